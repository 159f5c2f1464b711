//! Rare kinds of memory: calls of CUDA 2, pools without device memory or of another device, views of imports, a reset. Each is
//! recorded as the table in cupti/table.rs defines.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, Peer, agent};
use gpumem_test_support::alone;

const MIB: u64 = 1 << 20;
const ALLOC_HOST_V1: u32 = 37;
const FREE_HOST: u32 = 38;
const ARRAY_V1: u32 = 87;
const ARRAY_DESTROY: u32 = 89;
const ARRAY_3D_V1: u32 = 90;
const MIPMAP_DESTROY: u32 = 349;
const PRIMARY_RESET: u32 = 545;
const IMPORT_EXTERNAL: u32 = 485;
const MAPPED_MIPMAP: u32 = 487;
const DESTROY_EXTERNAL: u32 = 488;
const SET_POOL: u32 = 803;

/// Returns a CUmemPoolProps: allocation type and location.
fn pool_properties(kind: u32, location: u32, id: u32) -> [u64; 11] {
    [halves(kind, 0), halves(location, id), 0, 0, 0, 0, 0, 0, 0, 0, 0]
}

fn pool(number: u64, properties: [u64; 11]) {
    giving(POOL_CREATE, number, 0, &[properties.as_ptr() as u64]);
}

fn tracked(peer: &Peer) -> Vec<i64> {
    peer.view().accounts.iter().map(|account| account.tracked_bytes).collect()
}

#[test]
fn seldom_kinds_are_booked_where_they_belong() {
    alone(|| {
        let folder = Folder::new("kinds");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        let core = agent(&socket, |_| {});
        let mut peer = daemon.accept();
        peer.resync(1);
        context(CONTEXT, 0);
        context(Context { handle: 0x55_5500_2000, uid: 2 }, 1);
        alloc(0x1000, 7);

        // 32-bit sizes: the bits behind them do not belong to them.
        giving(ALLOC_HOST_V1, 0x7f00_0000_1000, 0, &[halves(3 * MIB as u32, 0xdead)]);
        let flat = [halves(64, 32), halves(0x20, 4)];
        giving(ARRAY_V1, 0x5550, 0, &[flat.as_ptr() as u64]);
        let deep = [halves(8, 4), halves(2, 0x10), halves(1, 0)];
        giving(ARRAY_3D_V1, 0x5560, 0, &[deep.as_ptr() as u64]);
        giving(ARRAY_V1, 0x5570, 0, &[0]); // no description, whatever the driver returns
        peer.catch_up();
        assert_eq!(peer.account().tracked_bytes, 7 + 64 * 32 * 4 * 4 + 8 * 4 * 2 * 2);
        assert_eq!(peer.account().beside.pinned_bytes, 3 * MIB as i64);
        taking(FREE_HOST, 0, &[0x7f00_0000_1000]);
        for array in [0x5550, 0x5560, 0x5570] {
            taking(ARRAY_DESTROY, 0, &[array]);
        }

        // Pools of managed and of host memory do not count on a device.
        pool(0x9000, pool_properties(2, 1, 0));
        pool(0xa000, pool_properties(1, 3, 0));
        giving(ALLOC_FROM_POOL, 0x2000, 0, &[5 * MIB, 0x9000, 0]);
        giving(ALLOC_FROM_POOL, 0x3000, 0, &[6 * MIB, 0xa000, 0]);
        peer.catch_up();
        let beside = peer.account().beside;
        assert_eq!((beside.managed_bytes, beside.pinned_bytes), (5 * MIB as i64, 6 * MIB as i64));
        assert_eq!(peer.account().tracked_bytes, 7);
        // cuMemAllocAsync does not use a pool that is set for managed memory.
        let location = halves(1, 0);
        taking(SET_POOL, 0, &[(&raw const location) as u64, 2, 0x9000]);
        giving(ALLOC_ASYNC, 0x4000, 0, &[11, 0]);
        taking(FREE_ASYNC, 0, &[0x2000, 0]);
        taking(FREE_ASYNC, 0, &[0x3000, 0]);
        taking(FREE_ASYNC, 0, &[0x4000, 0]);
        // The number of a pool is reused for device memory.
        taking(POOL_DESTROY, 0, &[0x9000]);
        taking(POOL_DESTROY, 0, &[0xa000]);
        assert!(!core.recorder.live.scan().any(|row| row.row[2] == 0x9000), "no row of such a pool");
        pool(0x9000, pool_properties(1, 1, 0));
        giving(ALLOC_FROM_POOL, 0x2000, 0, &[13, 0x9000, 0]);
        // A pool of the other device, used from this one's context.
        pool(0xb000, pool_properties(1, 1, 1));
        giving(ALLOC_FROM_POOL, 0x5000, 0, &[17, 0xb000, 0]);
        peer.catch_up();
        assert_eq!(tracked(&peer), [7 + 13, 17]);
        assert_eq!(peer.account().beside, Default::default());
        taking(FREE_ASYNC, 0, &[0x5000, 0]);
        taking(POOL_DESTROY, 0, &[0xb000]);

        // Two views of another API's memory: the import has the bytes.
        let description = [halves(1, 0), 0, 0, 9 * MIB];
        giving(IMPORT_EXTERNAL, 0x6000, 0, &[description.as_ptr() as u64]);
        giving(MAPPED_MIPMAP, 0x6100, 0, &[0x6000, 0]);
        peer.catch_up();
        assert_eq!(peer.account().beside.imported_bytes, 9 * MIB as i64);
        taking(MIPMAP_DESTROY, 0, &[0x6100]);
        taking(DESTROY_EXTERNAL, 0, &[0x6000]);
        peer.catch_up();
        assert_eq!((peer.account().beside, peer.view().odd), Default::default());

        // A reset removes the pools: they are not polled until they are used again.
        assert_eq!(core.driver_pools.device_of(0x9000), Some(0));
        taking(PRIMARY_RESET, 0, &[0]);
        assert_eq!(core.driver_pools.device_of(0x9000), None);
        peer.catch_up();
        assert_eq!(tracked(&peer)[0], 0);
        pool(0x9000, pool_properties(1, 1, 0));
        giving(ALLOC_FROM_POOL, 0x2000, 0, &[19, 0x9000, 0]);
        peer.catch_up();
        assert_eq!(tracked(&peer)[0], 19);
        assert_eq!(peer.view().odd, Default::default());
    });
}
