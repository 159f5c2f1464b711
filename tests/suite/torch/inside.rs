//! Tests inside a PyTorch program (tests/torch/inside.py), on an old and a new wheel.
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job};

#[test]
fn modules_tensors_and_backward_nodes_are_named() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        let machine = torch::machine(&[]);
        let mut daemon = Daemon::start(&machine, "daemon", "");
        let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "inside.py", &[]));
        let printed = torch::finished(&mut job);
        println!("{printed:#?}");
        daemon.stop();
    }
}
