//! A small complete file of each format.

use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::run::Source;
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_runs::export;
use gpumem_runs::recording::Writer;
use gpumem_wire::{Body, DeviceIdKind, MemoryKind, Phase, PoolOwner, Reading, Record, Role, Stamp};

fn recording() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes).expect("memory");
    let origin = Origin::Process(ProcessKey { pid: 7, start_ticks: 9 });
    let device = Body::Device {
        uuid_high: 1,
        uuid_low: 2,
        total_bytes: Reading::of(80 << 30),
        ordinal: 0,
        id: DeviceIdKind::Gpu,
        name: "H100",
    };
    let (memory, took_us) = (MemoryKind::Device, 0);
    let bodies = [
        device,
        Body::Tag { path: "torch" },
        Body::PoolCreate { pool: 1, parent: 0, reports_blocks: 1, owner: PoolOwner::Framework },
        Body::AllocEnd { address: 1 << 40, bytes: 2 << 20, pool: 1, took_us, memory },
        Body::BlockAlloc { address: 1 << 40, bytes: 512, pool: 1, use_as: (Role::Parameter, Phase::Setup) },
        Body::AllocEnd { address: 2 << 40, bytes: 1 << 20, pool: 0, took_us, memory },
    ];
    for (seq, body) in bodies.into_iter().enumerate() {
        let is_name = matches!(body, Body::Device { .. } | Body::Tag { .. });
        let seq = if is_name { 0 } else { seq as u64 - 1 };
        let stamp = Stamp { seq, time_ns: 1000 + seq, tag: 1, device: 0, ..Stamp::default() };
        writer.write(origin, &Record { stamp, body }).expect("memory");
    }
    writer.flush().expect("memory");
    drop(writer);
    bytes
}

/// Returns an exported run of a daemon.
fn exported() -> Vec<u8> {
    let source = Source { kind: "daemon".into(), origin: "node7".into(), preset: None };
    let mut builder = RunBuilder::new(source);
    let origin = Origin::Process(ProcessKey { pid: 7, start_ticks: 9 });
    let bodies = [
        Body::Tag { path: "fc_weight" },
        Body::AllocEnd { address: 1 << 40, bytes: 4096, pool: 0, took_us: 0, memory: MemoryKind::Device },
    ];
    for (seq, body) in (0..).zip(bodies) {
        let stamp = Stamp { seq, time_ns: 1000 + seq, tag: 1, device: 0, ..Stamp::default() };
        builder.observe(origin, &Record { stamp, body });
    }
    let run = builder.runs(false).remove(0);
    export::write(&run, "boot:7:9", &export::From::default()).expect("small enough")
}

/// Returns the example of the format with that name.
pub fn example(name: &str) -> Vec<u8> {
    let text = match name {
        "recording" => return recording(),
        export::FORMAT => return exported(),
        "torch-snapshot" => {
            let mut pickle = b"\x80\x02}(X\x08\x00\x00\x00segments](}(".to_vec();
            for (key, value) in [
                ("address", &b"\x8a\x06\x00\x00\x00\x00\x00\x7f"[..]),
                ("total_size", b"J\x00\x00\x20\x00"),
                (
                    "blocks",
                    b"](}(X\x04\x00\x00\x00sizeM\x00\x02X\x05\x00\x00\x00stateX\x10\x00\x00\x00active_allocatedue",
                ),
            ] {
                pickle.push(b'X');
                pickle.extend((key.len() as u32).to_le_bytes());
                pickle.extend(key.bytes());
                pickle.extend(value);
            }
            pickle.extend(b"ueX\x0d\x00\x00\x00device_traces](]eu.");
            return pickle;
        }
        "tbd-log" => {
            "[trace] x\n[mem] Allocate 1048576 bytes GPU memory (in_arg:fc_weight).\n\
             [mem] 4000 MB GPU global memory free, total 8119 MB.\n\
             Batch [50]\tMemory Usage: \tpython3-pid_12898=3933\tPower: 85.21 W\n"
        }
        "mxnet2-csv" => {
            "\"Attribute Name\",\"Requested Size\",\"Device\",\"Actual Size\",\"Reuse?\"\n\
             \"in_arg:fc_weight\",\"1000\",\"0\",\"4096\",\"0\"\n\"nvml_amend\",\"100000\",\"0\",\"100000\",\"0\"\n"
        }
        "mxnet1-trace" => {
            "{\"traceEvents\": [{\"ph\": \"M\", \"args\": {\"name\": \"gpu/0\"}, \"pid\": 0, \"name\": \"process_name\"},\n\
             {\"name\": \"Memory: gpu/0\", \"cat\": \"Device Storage\", \"ph\": \"C\", \"ts\": 1559670489349250, \"pid\": 77, \"tid\": 1, \
             \"args\": {\"Memory: gpu/0\": 201320}}], \"displayTimeUnit\": \"ms\"}\n"
        }
        "mxnet1-table" => {
            "Profile Statistics.\n\tNote that counter items are counter values and not time units.\nDevice Storage\n\
             =================\n\
             Name                          Total Count        Time (ms)    Min Time (ms)    Max Time (ms)    Avg Time (ms)\n\
             ----                          -----------        ---------    -------------    -------------    -------------\n\
             Memory: gpu/0                         264        2948.8799           0.2560       14080.7842        7040.2642\n"
        }
        "tbd-analysis" => "{\"in_arg\": [1024.0, [\"(in_arg:fc_weight).\\n\"]]}\n",
        "tbd-mem-csv" => {
            "epoch,iteration,peak_cached,current_cached,total_feature_map_usage,total_weight_usage,fc.weight,\
             total_layer_weight_gradient_usage,fc.weight_grad,intermediate_gradients\n\
             0,10,8259,7000,1200,178,178,178,178,50\n0,20,8259,7000,1200,178,178,178,178,50\n"
        }
        "nvidia-smi-csv" => "Wall time,Step,Value\n1543210121.25,50,4031.0\n1543210135.25,100,4031.0\n",
        "mxnet1-csv" => "in_arg:fc_weight,3.814697\narg_grad:fc_weight,3.814697\n",
        other => panic!("{other} has no example: give it one here"),
    };
    text.as_bytes().to_vec()
}
