//! gpumem-mcp: gpumemctl's reports and advice as tools of the Model Context Protocol, over standard input and output.
//!
//! Each tool runs `gpumemctl COMMAND --json`. The program is separate because the protocol's SDK is large.
//!
//! ```text
//! tools    the tools, their arguments, and the command line of a call
//! server   answers of the protocol, and the child process of a call
//! shorten  limits the length of a document
//! ```
#![forbid(unsafe_code)]

mod server;
mod shorten;
mod tools;

use anyhow::Context;
use rmcp::ServiceExt;
use std::process::ExitCode;

const USAGE: &str = "Usage: gpumem-mcp, or gpumemctl mcp\n\n\
A Model Context Protocol client starts this program and talks to it over standard input and output (docs/why.md).";

fn main() -> ExitCode {
    match std::env::args_os().nth(1) {
        None => {}
        Some(word) if word == "--version" => {
            println!("gpumem-mcp {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Some(word) => {
            let is_help = word == "--help" || word == "-h";
            eprintln!("{}{USAGE}", if is_help { "" } else { "gpumem-mcp takes no arguments.\n" });
            return if is_help { ExitCode::SUCCESS } else { ExitCode::from(2) };
        }
    }
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpumem-mcp: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Serves one client until standard input ends.
fn serve() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let service = server::Server::new().serve(rmcp::transport::stdio()).await;
        let service = match service {
            Err(rmcp::service::ServerInitializeError::ConnectionClosed(_)) => return Ok(()),
            service => {
                service.context("the client did not start the protocol; start this program from a client")?
            }
        };
        service.waiting().await.context("the protocol's task failed")?;
        Ok(())
    })
}
