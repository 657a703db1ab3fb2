//! Stands in for `service` where there is no systemd.

use std::sync::Arc;

use crate::status::Board;

pub fn ready() {}

pub fn stopping() {}

pub fn reloading() {}

pub async fn watchdog(_board: Arc<Board>) {}
