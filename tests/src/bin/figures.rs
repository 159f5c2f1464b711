//! `make figures`, or `cargo run -p gpumem-tests --bin figures -- [--details]`: the figures of gpumem_tests::structure.

use gpumem_tests::structure::figures::{Figures, table};
use gpumem_tests::structure::product_crates;

fn main() {
    let details = std::env::args().any(|word| word == "--details");
    let all: Vec<Figures> = product_crates().iter().map(|krate| Figures::of(krate)).collect();
    print!("{}", table(&all, details));
}
