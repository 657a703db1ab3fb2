//! Serves an empty cluster until it is ended: `denormd-simulated [PORT [SEED]]` prints its connection string.

#![allow(clippy::print_stdout, reason = "a program")]

use denormd_simulated::{Model, Server};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = || arguments.next().map(|text| text.parse::<u64>().map_err(std::io::Error::other)).transpose();
    let (port, seed) = (number()?.unwrap_or(0), number()?.unwrap_or(1));
    let port = u16::try_from(port).map_err(std::io::Error::other)?;
    let server = Server::start(Model::new(seed), port).await?;
    println!("{}", server.uri());
    std::future::pending().await
}
