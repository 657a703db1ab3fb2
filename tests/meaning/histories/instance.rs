//! A whole daemon in the process of a simulation, with its lease, its HTTP server and everything else that it starts.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use denormd::{
    commands::{
        Failure,
        run::{signals::Signals, until_stopped},
    },
    server::client,
};
use denormd_engine::deployment::identity::Identity;
use denormd_simulated::Model;
use tokio::{sync::oneshot, task::JoinHandle};

use crate::support::daemon::{PATIENCE, load};

/// The port of the first instance.
const PORT: u16 = 28000;

/// The host names and process ids of the instances.
#[derive(Debug, Clone, Copy)]
pub enum Naming {
    /// Each instance has a host of its own, and each start another process id.
    Hosts,
    /// Each instance has a container of its own, which keeps its host name. Its process always has the id 1.
    Containers,
    /// All containers were given the same host name.
    SameContainers,
}

/// An instance that is started, killed and started again.
pub struct Instance {
    pub address: SocketAddr,
    /// Its number of partitions from the next start on.
    pub partitions: u32,
    model: Model,
    folder: tempfile::TempDir,
    config: String,
    nth: u16,
    naming: Naming,
    /// The identity of the last start.
    identity: Option<Identity>,
    /// Number of starts; part of the app name, so that the cluster can ignore an earlier start.
    starts: u32,
    /// Requests a stop when it is dropped.
    asked: Option<oneshot::Sender<()>>,
    running: Option<JoinHandle<Result<(), Failure>>>,
}

impl Instance {
    /// A config without `lease`, whose address is replaced. Nothing runs yet.
    pub fn new(config: &str, nth: u16, partitions: u32, naming: Naming, model: Model) -> Self {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT + nth));
        let folder = tempfile::tempdir().unwrap();
        let config = config.to_owned();
        Self {
            address,
            partitions,
            model,
            folder,
            config,
            nth,
            naming,
            identity: None,
            starts: 0,
            asked: None,
            running: None,
        }
    }

    /// Replaces its config, which it reads within a second if it runs.
    pub fn configure(&mut self, config: &str) {
        config.clone_into(&mut self.config);
        std::fs::write(self.file(), self.text()).unwrap();
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("denormd.yaml")
    }

    /// The config with the address, the app name and the number of partitions of this start.
    fn text(&self) -> String {
        let app_name = format!("replicaSet=rs0&appName={}", self.app_name());
        let text = self.config.replace("127.0.0.1:0", &self.address.to_string());
        let text = text.replacen("replicaSet=rs0", &app_name, 1);
        format!("{text}lease: {{ ttl_seconds: 2, partitions: {} }}\n", self.partitions)
    }

    fn app_name(&self) -> String {
        format!("denormd-{}.{}", self.nth, self.starts)
    }

    /// The name of the last start.
    pub fn name(&self) -> String {
        self.identity.as_ref().unwrap().to_string()
    }

    pub fn start(&mut self) {
        self.starts += 1;
        let (ask, asked) = oneshot::channel();
        self.asked = Some(ask);
        let (paths, text) = ([self.file()], self.text());
        std::fs::write(&paths[0], &text).unwrap();
        let host = || format!("daemon-{}", self.nth);
        let identity = match self.naming {
            Naming::Hosts => Identity::new(host(), i64::from(self.starts)),
            Naming::Containers => Identity::new(host(), 1),
            Naming::SameContainers => Identity::new("daemon".to_owned(), 1),
        };
        self.identity = Some(identity.clone());
        let (loaded, signals) = (load(&text), Signals::until(asked, &paths));
        self.running = Some(tokio::spawn(async move { until_stopped(&paths, loaded, true, identity, signals).await }));
    }

    /// Ends it at this moment: the cluster ignores the tasks that it leaves behind. Returns false if it has not reached the
    /// cluster yet.
    pub fn kill(&mut self) -> Result<bool, String> {
        let running = self.running()?;
        running.abort();
        Ok(self.model.ignore(&self.app_name()))
    }

    /// Ends it as SIGTERM does. It may fail to hand over during a fault, and then exits with an error.
    pub async fn stop(&mut self) -> Result<(), String> {
        let running = self.running()?;
        self.asked = None;
        let ended = tokio::time::timeout(PATIENCE, running).await;
        match ended.map_err(|_| format!("daemon {} does not stop", self.nth))? {
            Ok(Ok(()) | Err(_)) => Ok(()),
            Err(panic) => Err(format!("daemon {} panics: {panic}", self.nth)),
        }
    }

    /// Stops it, and starts it again with this number of partitions.
    pub async fn repartition(&mut self, partitions: u32) -> Result<(), String> {
        self.stop().await?;
        self.partitions = partitions;
        self.start();
        Ok(())
    }

    /// The running task, unless it has ended by itself.
    fn running(&mut self) -> Result<JoinHandle<Result<(), Failure>>, String> {
        let running = self.running.take().filter(|running| !running.is_finished());
        running.ok_or_else(|| format!("daemon {} has ended by itself", self.nth))
    }

    /// Cuts it off from the cluster. Returns false if it has not reached the cluster yet.
    pub fn disconnect(&self) -> bool {
        self.model.disconnect(&self.app_name())
    }

    /// Ends [`Instance::disconnect`].
    pub fn connect(&self) {
        self.model.connect(&self.app_name());
    }

    /// True if it has ended by itself.
    pub fn has_ended(&self) -> bool {
        self.running.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// The number of times that this start has read another config.
    pub async fn reloads(&self) -> Option<f64> {
        let metrics = client::get(self.address, "/metrics", Duration::from_secs(5)).await.ok()?;
        let text = String::from_utf8(metrics.body).unwrap();
        let line =
            text.lines().find_map(|line| line.strip_prefix("denormd_config_reloads_total{outcome=\"done\"} "))?;
        line.parse().ok()
    }
}
