//! The Python package: its own tests, with the agent on the simulated GPU.
use gpumem_tests::live::Machine;
use gpumem_tests::live::programs::programs;
use std::path::Path;
use std::process::Command;

#[allow(dead_code)]
#[path = "../../agent-lib/tests/suite/common/pythons.rs"]
mod pythons;

fn unittest(command: &mut Command) -> String {
    let package =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("agent-lib/python");
    command.args(["-m", "unittest", "discover", "-s"]).arg(package.join("tests"));
    let output = command.env("PYTHONDONTWRITEBYTECODE", "1").output().expect("python3 is needed");
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{printed}");
    printed
}

#[test]
fn python_tests_pass_without_an_agent() {
    let printed = unittest(Command::new("python3").env_remove("CUDA_INJECTION64_PATH"));
    assert!(printed.contains("skipped="), "{printed}");
}

#[test]
fn python_tests_pass_with_the_agent() {
    let machine = Machine::new(&["devices=1"]);
    let mut command = machine.command("python3");
    command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
    command.env("GPUMEM_SOCKET", machine.dir.join("nobody.sock")).env("GPUMEM_TEST_AGENT", "1");
    let printed = unittest(&mut command);
    assert!(printed.contains("OK") && !printed.contains("skipped"), "{printed}");
    let shown = machine.tool("show", &[]);
    assert!(shown.contains("\nviolations=0\n"), "{shown}");
}

/// Lane `python`.
mod python {
    use super::*;

    /// The oldest supported version, those up to the newest, and one without a GIL.
    #[test]
    fn python_tests_pass_on_every_installed_python() {
        let without_gil = pythons::free_threaded().map(|python| ("without a GIL".to_owned(), python));
        for (version, python) in pythons::pythons().iter().chain(&without_gil) {
            let printed = unittest(Command::new(python).env_remove("CUDA_INJECTION64_PATH"));
            assert!(printed.contains("OK"), "CPython {version}: {printed}");
            println!("CPython {version}");
        }
    }
}
