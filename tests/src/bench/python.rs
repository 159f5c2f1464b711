//! Cost of a scope from Python, with and without the agent, compared with a context manager that does nothing.

use std::path::Path;
use std::process::Command;

pub fn run() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = std::env::current_exe().ok().map(|path| path.with_file_name("libgpumem.so"));
    let Some(library) = library.filter(|library| library.exists()) else {
        println!("libgpumem.so is not built: cargo build --release -p gpumem-agent");
        return;
    };
    for (what, title) in [("agent", "with the agent"), ("none", "without")] {
        let mut command = Command::new("python3");
        command.arg(here.join("data/scope_cost.py")).arg(what).env("PYTHONDONTWRITEBYTECODE", "1");
        command
            .env("PYTHONPATH", here.with_file_name("agent-lib/python"))
            .env("GPUMEM_SOCKET", "/nonexistent");
        match what {
            "agent" => command.env("CUDA_INJECTION64_PATH", &library),
            _ => command.env_remove("CUDA_INJECTION64_PATH"),
        };
        let Ok(output) = command.output() else {
            println!("no python3 here");
            return;
        };
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let figures: Vec<(&str, f64)> = said
            .lines()
            .filter_map(|line| line.split_once('\t'))
            .filter_map(|(name, ns)| Some((name, ns.parse().ok()?)))
            .collect();
        println!("{title}, ns per `with` block (lowest of 1,500 rounds)");
        for pair in figures.chunks(2) {
            let [(floor_name, floor), (name, ns)] = pair else { continue };
            println!("  {floor_name:26} {floor:8.1}");
            println!("  {name:26} {ns:8.1}   {:+.1} over its floor, {:.1} times", ns - floor, ns / floor);
        }
    }
}
