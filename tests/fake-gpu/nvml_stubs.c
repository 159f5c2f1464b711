/* Well-known names that have nothing to do with memory. Clients that bind by name find them; they are not
 * supported here. */
#include "nvml_internal.h"

#define STUB(name) \
    EXPORT nvmlReturn nvml##name(void) { return NOT_SUPPORTED; }

STUB(DeviceGetArchitecture) STUB(DeviceGetAttributes_v2) STUB(DeviceGetBoardId) STUB(DeviceGetBoardPartNumber)
STUB(DeviceGetBrand) STUB(DeviceGetBusType) STUB(DeviceGetClock) STUB(DeviceGetClockInfo)
STUB(DeviceGetComputeMode) STUB(DeviceGetCudaComputeCapability) STUB(DeviceGetCurrPcieLinkGeneration)
STUB(DeviceGetCurrPcieLinkWidth) STUB(DeviceGetCurrentClocksThrottleReasons) STUB(DeviceGetDecoderUtilization)
STUB(DeviceGetDetailedEccErrors) STUB(DeviceGetEccMode) STUB(DeviceGetEncoderUtilization)
STUB(DeviceGetEnforcedPowerLimit) STUB(DeviceGetFanSpeed) STUB(DeviceGetFanSpeed_v2) STUB(DeviceGetFieldValues)
STUB(DeviceGetGpuOperationMode) STUB(DeviceGetGspFirmwareMode) STUB(DeviceGetGspFirmwareVersion)
STUB(DeviceGetHandleBySerial) STUB(DeviceGetInforomVersion)
STUB(DeviceGetMaxClockInfo) STUB(DeviceGetMaxCustomerBoostClock) STUB(DeviceGetMaxPcieLinkGeneration)
STUB(DeviceGetMaxPcieLinkWidth) STUB(DeviceGetMemoryErrorCounter) STUB(DeviceGetMultiGpuBoard)
STUB(DeviceGetNumGpuCores) STUB(DeviceGetNvLinkRemoteDeviceType) STUB(DeviceGetNvLinkRemotePciInfo_v2)
STUB(DeviceGetNvLinkState) STUB(DeviceGetP2PStatus)
STUB(DeviceGetPcieThroughput) STUB(DeviceGetPerformanceState) STUB(DeviceGetPersistenceMode)
STUB(DeviceGetPowerManagementDefaultLimit) STUB(DeviceGetPowerManagementLimit)
STUB(DeviceGetPowerManagementLimitConstraints) STUB(DeviceGetPowerManagementMode) STUB(DeviceGetPowerState)
STUB(DeviceGetProcessUtilization) STUB(DeviceGetRemappedRows)
STUB(DeviceGetRetiredPages) STUB(DeviceGetRetiredPagesPendingStatus) STUB(DeviceGetSamples) STUB(DeviceGetSerial)
STUB(DeviceGetTemperature) STUB(DeviceGetTemperatureThreshold) STUB(DeviceGetTopologyCommonAncestor)
STUB(DeviceGetTotalEccErrors) STUB(DeviceGetTotalEnergyConsumption)
STUB(DeviceGetVbiosVersion) STUB(DeviceGetVirtualizationMode) STUB(DeviceSetMigMode) STUB(DeviceSetPersistenceMode)
STUB(GpmQueryDeviceSupport) STUB(SystemGetProcessName) STUB(UnitGetCount)
#if SIM_NVML == 3
STUB(DeviceGetProcessesUtilizationInfo) STUB(DeviceGetTemperatureV) STUB(DeviceGetConfComputeProtectedMemoryUsage)
#endif
