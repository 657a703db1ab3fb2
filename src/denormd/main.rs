//! The denormd binary: exit codes, nothing else.

use denormd::{cli::Cli, commands};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() {
    let cli = Cli::read();
    let status = match commands::dispatch(&cli).await {
        Ok(()) => 0,
        Err(failure) => {
            #[expect(clippy::print_stderr, reason = "the one place that tells the user why a command failed")]
            {
                eprintln!("{failure}");
            }
            failure.status()
        }
    };
    // Not by returning: a task of the driver that the runtime drops on its way out, such as a `killCursors`, may panic then,
    // and a command that was done printed a panic.
    std::process::exit(status);
}
