//! A connection that is replaced while those that use it go on.

use std::sync::{Arc, Mutex, PoisonError};

use crate::mongo::Server;

/// What a process talks to the cluster by. All clones are replaced at once: the password of an old connection may not be
/// good for another one.
#[derive(Debug, Clone)]
pub struct Connection(Arc<Mutex<Arc<Server>>>);

impl Connection {
    /// The one that is used now.
    #[must_use]
    pub fn now(&self) -> Arc<Server> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Uses another one from now on.
    pub fn replace(&self, server: Server) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(server);
    }
}

impl From<Server> for Connection {
    fn from(server: Server) -> Self {
        Self(Arc::new(Mutex::new(Arc::new(server))))
    }
}
