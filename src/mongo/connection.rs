//! A shared connection that can be replaced while it is in use.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::Server;

/// The connection of a process to the cluster. All clones are replaced at once: the password of an old connection may
/// no longer be valid for a new one.
#[derive(Debug, Clone)]
pub struct Connection(Arc<Mutex<Arc<Server>>>);

impl Connection {
    /// The current connection.
    #[must_use]
    pub fn now(&self) -> Arc<Server> {
        self.0.lock().clone()
    }

    /// Replaces the connection for all clones.
    pub fn replace(&self, server: Server) {
        *self.0.lock() = Arc::new(server);
    }
}

impl From<Server> for Connection {
    fn from(server: Server) -> Self {
        Self(Arc::new(Mutex::new(Arc::new(server))))
    }
}
