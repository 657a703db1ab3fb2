//! The whole daemon in the process of a simulation, with its lease, its HTTP server and everything else that it starts.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use denormd::commands::{
    Failure,
    run::{signals::Signals, until_stopped},
};
use denormd_simulated::Model;
use tokio::{sync::oneshot, task::JoinHandle};

use crate::support::daemon::load;

/// The port of the first instance.
const PORT: u16 = 28000;

/// An instance that is started, killed and started again.
pub struct Instance {
    pub address: SocketAddr,
    model: Model,
    folder: tempfile::TempDir,
    config: String,
    nth: u16,
    /// The number of times it was started: the cluster tells its lives apart.
    life: u32,
    /// Ends it when it is dropped.
    asked: Option<oneshot::Sender<()>>,
    running: Option<JoinHandle<Result<(), Failure>>>,
}

impl Instance {
    /// A complete config, whose address is replaced. Nothing runs yet.
    pub fn new(config: &str, nth: u16, address: IpAddr, model: Model) -> Self {
        let (address, folder) = (SocketAddr::new(address, PORT + nth), tempfile::tempdir().unwrap());
        Self { address, model, folder, config: config.to_owned(), nth, life: 0, asked: None, running: None }
    }

    /// Gives it another config, which it reads within a second if it runs.
    pub fn configure(&mut self, config: &str) {
        config.clone_into(&mut self.config);
        std::fs::write(self.file(), self.text()).unwrap();
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("denormd.yaml")
    }

    /// The config with the address and the name of this life.
    fn text(&self) -> String {
        let with_name = format!("replicaSet=rs0&appName={}", self.program());
        self.config.replace("127.0.0.1:0", &self.address.to_string()).replacen("replicaSet=rs0", &with_name, 1)
    }

    /// The name that it tells the cluster.
    fn program(&self) -> String {
        format!("denormd-{}.{}", self.nth, self.life)
    }

    pub fn start(&mut self) {
        self.life += 1;
        let (ask, asked) = oneshot::channel();
        self.asked = Some(ask);
        let (paths, text) = ([self.file()], self.text());
        std::fs::write(&paths[0], &text).unwrap();
        let (loaded, signals) = (load(&text), Signals::until(asked, &paths));
        self.running = Some(tokio::spawn(async move { until_stopped(&paths, loaded, true, signals).await }));
    }

    /// Ends it at this moment. What it has left in this process is never heard again.
    pub fn kill(&mut self) {
        self.model.banish(&self.program());
        if let Some(running) = self.running.take() {
            running.abort();
        }
    }

    /// Ends it as SIGTERM does.
    pub async fn stop(&mut self) {
        self.asked = None;
        if let Some(running) = self.running.take() {
            running.await.unwrap().unwrap();
        }
    }

    /// Cuts it off from the cluster.
    pub fn disconnect(&self) {
        self.model.disconnect(&self.program());
    }

    /// Ends [`Instance::disconnect`].
    pub fn connect(&self) {
        self.model.connect(&self.program());
    }

    /// True if it has ended by itself.
    pub fn has_ended(&self) -> bool {
        self.running.as_ref().is_some_and(JoinHandle::is_finished)
    }
}
