//! Several instances, several members, upgrades of the server.

pub mod lease;
pub mod partitions;
pub mod rolling_upgrade;
pub mod routers;
pub mod standbys;
pub mod upgrades;
pub mod waits;
