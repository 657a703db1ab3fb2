//! The denormd binary: exit codes, nothing else.

use std::process::ExitCode;

use clap::Parser;
use denormd::{cli::Cli, commands};

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    match commands::dispatch(&cli).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            #[expect(clippy::print_stderr, reason = "the one place that tells the user why a command failed")]
            {
                eprintln!("{failure}");
            }
            failure.status()
        }
    }
}
