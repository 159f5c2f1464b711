//! Callback ids. Names are those of the header, so that they can be searched for.
#![allow(non_upper_case_globals, missing_docs)]

macro_rules! ids {
    ($( $name:ident = $id:literal ),* $(,)?) => {
        $( pub const $name: u32 = $id; )*
        /// Name and number of each driver id here, to be compared with cuptiGetCallbackName.
        pub const DRIVER: &[(&str, u32)] = &[$( (stringify!($name), $id) ),*];
    };
}

// Introduced between CUDA 2.0 and 13.4. An id that a library does not know yet is refused by
// cuptiEnableCallback and can be skipped.
ids! {
    cuInit = 1,
    cuDeviceGetCount = 4,
    cuCtxCreate = 10,
    cuCtxDestroy = 11,
    cuModuleLoad = 18,
    cuModuleLoadData = 19,
    cuModuleLoadDataEx = 20,
    cuModuleLoadFatBinary = 21,
    cuModuleUnload = 22,
    cuMemAlloc = 29,
    cuMemAllocPitch = 31,
    cuMemFree = 33,
    cuMemAllocHost = 37,
    cuMemFreeHost = 38,
    cuMemHostAlloc = 39,
    cuArrayCreate = 87,
    cuArrayDestroy = 89,
    cuArray3DCreate = 90,
    cuStreamCreate = 124,
    cuGraphicsMapResources = 133,
    cuCtxSetLimit = 136,
    cuGLCtxCreate = 174,
    cuVDPAUCtxCreate = 187,
    cuCtxCreate_v2 = 235,
    cuGLCtxCreate_v2 = 239,
    cuVDPAUCtxCreate_v2 = 240,
    cuMemAlloc_v2 = 243,
    cuMemAllocPitch_v2 = 244,
    cuMemFree_v2 = 245,
    cuArrayCreate_v2 = 272,
    cuArray3DCreate_v2 = 274,
    cuMemAllocHost_v2 = 294,
    cuMemHostRegister = 301,
    cuMemHostUnregister = 302,
    cuCtxEnablePeerAccess = 313,
    cuCtxDestroy_v2 = 322,
    cuIpcGetMemHandle = 328,
    cuIpcOpenMemHandle = 329,
    cuIpcCloseMemHandle = 330,
    cuMipmappedArrayCreate = 347,
    cuMipmappedArrayDestroy = 349,
    cuStreamCreateWithPriority = 367,
    cuMemAllocManaged = 371,
    cuMemHostRegister_v2 = 379,
    cuDevicePrimaryCtxRetain = 386,
    cuDevicePrimaryCtxRelease = 387,
    cuDevicePrimaryCtxReset = 389,
    cuGraphicsMapResources_ptsz = 443,
    cuMemAdvise = 457,
    cuMemPrefetchAsync = 467,
    cuImportExternalMemory = 485,
    cuExternalMemoryGetMappedBuffer = 486,
    cuExternalMemoryGetMappedMipmappedArray = 487,
    cuDestroyExternalMemory = 488,
    cuGraphInstantiate = 513,
    cuGraphLaunch = 514,
    cuGraphLaunch_ptsz = 515,
    cuGraphExecDestroy = 516,
    cuDevicePrimaryCtxRelease_v2 = 544,
    cuDevicePrimaryCtxReset_v2 = 545,
    cuMemAddressReserve = 547,
    cuMemAddressFree = 548,
    cuMemCreate = 549,
    cuMemRelease = 550,
    cuMemMap = 551,
    cuMemUnmap = 552,
    cuMemSetAccess = 553,
    cuMemExportToShareableHandle = 554,
    cuMemImportFromShareableHandle = 555,
    cuMemRetainAllocationHandle = 565,
    cuIpcOpenMemHandle_v2 = 567,
    cuGraphInstantiate_v2 = 578,
    cuGraphUpload = 580,
    cuGraphUpload_ptsz = 581,
    cuMemMapArrayAsync = 584,
    cuMemMapArrayAsync_ptsz = 585,
    cuMemAllocAsync = 598,
    cuMemAllocAsync_ptsz = 599,
    cuMemFreeAsync = 600,
    cuMemFreeAsync_ptsz = 601,
    cuMemPoolTrimTo = 602,
    cuMemPoolSetAttribute = 603,
    cuMemPoolGetAttribute = 604,
    cuDeviceGetDefaultMemPool = 606,
    cuMemPoolCreate = 607,
    cuMemPoolDestroy = 608,
    cuDeviceSetMemPool = 609,
    cuDeviceGetMemPool = 610,
    cuMemAllocFromPoolAsync = 611,
    cuMemAllocFromPoolAsync_ptsz = 612,
    cuMemPoolImportFromShareableHandle = 614,
    cuMemPoolImportPointer = 616,
    cuUserObjectCreate = 633,
    cuGraphAddMemAllocNode = 638,
    cuGraphAddMemFreeNode = 639,
    cuDeviceGraphMemTrim = 640,
    cuDeviceGetGraphMemAttribute = 641,
    cuDeviceSetGraphMemAttribute = 642,
    cuGraphInstantiateWithFlags = 643,
    cuCtxCreate_v3 = 645,
    cuGraphInstantiateWithParams = 656,
    cuGraphInstantiateWithParams_ptsz = 657,
    cuGetProcAddress_v2 = 677,
    cuLibraryLoadData = 678,
    cuLibraryLoadFromFile = 679,
    cuLibraryUnload = 680,
    cuLibraryGetModule = 682,
    cuMulticastCreate = 706,
    cuMulticastAddDevice = 707,
    cuMulticastBindMem = 708,
    cuMulticastBindAddr = 709,
    cuMulticastUnbind = 710,
    cuGraphAddNode = 712,
    cuMemPrefetchAsync_v2 = 716,
    cuGraphAddNode_v2 = 723,
    cuGreenCtxCreate = 743,
    cuGreenCtxDestroy = 744,
    cuCtxFromGreenCtx = 753,
    cuCtxCreate_v4 = 757,
    cuCheckpointProcessCheckpoint = 771,
    cuCheckpointProcessRestore = 772,
    cuMemDiscardBatchAsync = 789,
    cuMemGetDefaultMemPool = 801,
    cuMemGetMemPool = 802,
    cuMemSetMemPool = 803,
    cuMulticastBindMem_v2 = 820,
    cuMulticastBindAddr_v2 = 821,
    cuLogicalEndpointCreate = 850,
    cuLogicalEndpointDestroy = 852,
    cuLogicalEndpointBindMem = 854,
    cuGraphAddNode_v3 = 863,
}

/// Ids of the RESOURCE domain.
pub mod resource {
    pub const CONTEXT_CREATED: u32 = 1;
    pub const CONTEXT_DESTROY_STARTING: u32 = 2;
    pub const MODULE_LOADED: u32 = 6;
    pub const MODULE_UNLOAD_STARTING: u32 = 7;
    pub const GRAPHNODE_CREATED: u32 = 13;
    pub const GRAPHEXEC_CREATED: u32 = 18;
    pub const GRAPHEXEC_DESTROY_STARTING: u32 = 19;
}

/// Ids of the STATE domain, from CUDA 12.2.
pub mod state {
    /// CUPTI has given up and finalized itself: a subscription is dead.
    pub const FATAL_ERROR: u32 = 1;
    pub const ERROR: u32 = 2;
}
