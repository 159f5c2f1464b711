//! `gpumemctl report A B C`: each as if it had been asked for alone.

use super::one;
use crate::args::Report as Args;
use anyhow::{Result, bail};

/// The arguments for each alone.
pub(crate) fn alone(args: &Args) -> Vec<Args> {
    let names = args.run.iter().chain(&args.more);
    let alone: Vec<Args> =
        names.map(|name| Args { run: Some(name.clone()), more: Vec::new(), ..args.clone() }).collect();
    // None was named: it is the latest run.
    if alone.is_empty() { vec![args.clone()] } else { alone }
}

/// All reports in their order: texts below each other, documents as one array.
pub(crate) fn each(args: &Args) -> Result<String> {
    if args.csv || args.html || args.traced.is_asked() {
        bail!("this form is of one run: name one, or take text, --json or a picture");
    }
    let told: Vec<String> = alone(args).iter().map(one).collect::<Result<_>>()?;
    Ok(if args.json {
        let documents: Vec<&str> = told.iter().map(|document| document.trim_end()).collect();
        format!("[{}]\n", documents.join(",\n"))
    } else {
        told.join("\n")
    })
}
