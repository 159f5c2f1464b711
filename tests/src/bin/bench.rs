//! `cargo run --release -p gpumem-tests --bin bench -- [NAME...]`: measurements of gpumem_tests::bench.

use gpumem_tests::bench::{ALL, player};
use std::process::ExitCode;

fn main() -> ExitCode {
    let names: Vec<String> = std::env::args().skip(1).collect();
    if names.first().is_some_and(|name| name == player::NAME) {
        player::play(&names[1..]);
        return ExitCode::SUCCESS;
    }
    let known = |name: &String| ALL.iter().any(|bench| bench.name == name);
    if !names.iter().all(known) {
        eprintln!("usage: bench [NAME...]; without names all of:\n");
        ALL.iter().for_each(|bench| eprintln!("  {:<10} {}", bench.name, bench.about));
        return ExitCode::from(2);
    }
    if cfg!(debug_assertions) {
        eprintln!("built without --release: the figures mean nothing");
    }
    for bench in ALL.iter().filter(|bench| names.is_empty() || names.iter().any(|name| name == bench.name)) {
        println!("# {}: {}\n", bench.name, bench.about);
        (bench.run)();
    }
    ExitCode::SUCCESS
}
