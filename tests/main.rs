//! One binary for every test that needs a server: the driver is heavy to link.

mod copy_rules;
mod daemon;
mod floors;
mod histories;
mod keys_on_server;
