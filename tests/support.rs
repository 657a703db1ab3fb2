//! Helpers of the tests: daemons inside the process and outside, table tests, a small application, impostors of servers.

pub mod cases;
pub mod daemon;
pub mod impostor;
pub mod process;
pub mod running;
pub mod script;
pub mod seeds;
pub mod world;
