//! The page in a real browser: its content, by keyboard, on a phone. `SCREENSHOTS=folder` keeps screenshots.

use std::{
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use fantoccini::{
    Client, ClientBuilder, Locator,
    actions::{InputSource, KeyAction, KeyActions},
    key::Key,
};
use serde_json::{Value, json};

use crate::support::daemon::PATIENCE;
use crate::support::{
    running::{Running, causes},
    script::found_by,
};

const RULES: &str = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }
  - { name: note, copy: { source: log, target: notes, match: { log: _id }, set: { ip: $ip } } }";

/// A headless browser and its driver, which end with the test.
struct Browser {
    driver: Child,
    client: Client,
}

impl Browser {
    /// Starts a browser, if one is available.
    async fn start() -> Option<Self> {
        let program = found_by("chromium.py")?;
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let quiet = || Stdio::null();
        // A process group for the browsers that it starts: they do not end with it.
        let mut driver = Command::new(program);
        driver.arg(format!("--port={port}")).stdout(quiet()).stderr(quiet()).process_group(0);
        let driver = driver.spawn().unwrap();
        // In a container there is no sandbox, and little shared memory.
        let arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1500"];
        let capabilities = json!({"goog:chromeOptions": {"args": arguments}});
        let limit = Instant::now() + PATIENCE;
        loop {
            let mut builder = ClientBuilder::new(hyper_util::client::legacy::connect::HttpConnector::new());
            builder.capabilities(capabilities.as_object().unwrap().clone());
            match builder.connect(&format!("http://127.0.0.1:{port}")).await {
                Ok(client) => return Some(Self { driver, client }),
                Err(error) => assert!(Instant::now() < limit, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn script(&self, script: &str) -> Value {
        self.client.execute(script, Vec::new()).await.unwrap()
    }

    async fn text(&self, id: &str) -> String {
        self.client.find(Locator::Id(id)).await.unwrap().text().await.unwrap()
    }

    async fn press(&self, key: Key) {
        let press = KeyActions::new("keys".to_owned())
            .then(KeyAction::Down { value: key.into() })
            .then(KeyAction::Up { value: key.into() });
        self.client.perform_actions(press).await.unwrap();
    }

    /// Presses a key until a script returns true.
    async fn press_until(&self, key: Key, enough: &str) {
        for _ in 0..30 {
            self.press(key).await;
            if self.script(enough).await == json!(true) {
                return;
            }
        }
        panic!("{enough} does not come true by pressing {key:?}");
    }

    async fn until(&self, what: &str, script: &str) {
        let limit = Instant::now() + PATIENCE;
        while self.script(script).await != json!(true) {
            assert!(Instant::now() < limit, "{what}: {}", self.script("return document.body.innerText").await);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Keeps a screenshot, if requested.
    async fn picture(&self, name: &str) {
        if let Ok(folder) = std::env::var("SCREENSHOTS") {
            let picture = self.client.screenshot().await.unwrap();
            std::fs::write(Path::new(&folder).join(format!("{name}.png")), picture).unwrap();
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have ended by itself.
        Command::new("kill").args(["-KILL", "--", &format!("-{}", self.driver.id())]).status().ok();
        self.driver.wait().ok();
    }
}

async fn shop(test: &TestDb) {
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    let log: Vec<Document> = (0..5000).map(|id| doc! {"_id": id, "host": 1}).collect();
    db.collection("log").insert_many(log).await.unwrap();
    db.collection("notes").insert_one(doc! {"_id": 1, "log": 0}).await.unwrap();
}

async fn fail_point(set: &ReplicaSet, data: Option<Document>) {
    let command = match data {
        Some(data) => doc! {"configureFailPoint": "failCommand", "mode": "alwaysOn", "data": data},
        None => doc! {"configureFailPoint": "failCommand", "mode": "off"},
    };
    set.client().await.database("admin").run_command(command).await.unwrap();
}

/// Writes unrelated data until the oplog has dropped all its current entries.
async fn run_over(set: &ReplicaSet) {
    let client = set.client().await;
    let oplog = client.database("local").collection::<Document>("oplog.rs");
    let edge = async |order: i32| loop {
        // The first entry may be truncated during the read.
        if let Ok(Some(entry)) = oplog.find_one(doc! {}).sort(doc! {"$natural": order}).await {
            return entry.get_timestamp("ts").unwrap();
        }
    };
    let (last, limit) = (edge(-1).await, Instant::now() + PATIENCE);
    while edge(1).await <= last {
        assert!(Instant::now() < limit, "the oplog does not run over");
        let junk = client.database("junk").collection("junk");
        junk.insert_many((0..4).map(|_| doc! {"x": "x".repeat(1 << 20)})).await.unwrap();
    }
}

/// During an outage the page reports it, and keeps the last known values. `SCREENSHOTS=folder` keeps screenshots at 10,
/// 40 and 120 s.
#[tokio::test(flavor = "multi_thread")]
async fn in_an_outage_the_page_says_what_is_known_and_how_old_it_is() {
    let Some(browser) = Browser::start().await else { return };
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    shop(&test).await;
    // It does not end during the outage.
    let lease = "lease: { ttl_seconds: 60 }\n";
    let leader = Running::start(&test, RULES, lease).await;
    let standby = Running::start(&test, RULES, lease).await;
    standby
        .until("it has heard of the leader", |status| status.rules.len() == 2 && status.lag_seconds == Some(0.0))
        .await;
    let open = async |running: &Running| {
        browser.client.goto(&format!("http://{}/", running.address)).await.unwrap();
        browser.until("rules", "return document.querySelectorAll('#rules tr').length === 2").await;
        browser.until("instances", "return document.querySelectorAll('#instances tr').length === 2").await;
    };
    open(&standby).await;
    let named = "const text = document.getElementById('summary').innerText; \
                 return text.startsWith('Standing by: ') && text.includes(' leads. Not behind')";
    browser.until("who leads", named).await;
    assert!(browser.text("role").await.starts_with("standby of "));
    browser.picture("standby").await;
    open(&leader).await;
    let began = Instant::now();
    set.node(0).sigstop();
    let moments: &[u64] = if std::env::var("SCREENSHOTS").is_ok() { &[10, 40, 120] } else { &[10] };
    for moment in moments {
        tokio::time::sleep(Duration::from_secs(*moment).saturating_sub(began.elapsed())).await;
        for (running, name) in [(&leader, "leader"), (&standby, "standby")] {
            open(running).await;
            browser
                .until("it says so", "return document.getElementById('summary').innerText.startsWith('No primary')")
                .await;
            assert!(browser.text("summary").await.contains("Behind by "));
            assert_eq!(browser.text("role").await, "leader unknown");
            assert!(browser.text("causes").await.contains("no_primary"));
            assert_eq!(browser.script("return document.getElementById('verdict').className").await, "critical");
            browser.picture(&format!("outage-{moment}s-{name}")).await;
        }
    }
    set.node(0).sigcont();
    browser.until("well", "return document.getElementById('summary').innerText.includes('Not behind')").await;
}

/// Fifty rules: each is found by name and by state, and the page is no wider than a phone.
#[tokio::test(flavor = "multi_thread")]
async fn fifty_rules_are_read_on_a_phone_too() {
    let Some(browser) = Browser::start().await else { return };
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let rule = |nth: u32| {
        format!(
            "  - {{ name: rule-number-{nth}, copy: {{ source: hosts, target: log, match: {{ host: _id }}, set: {{ ip{nth}: $ip }} }} }}\n"
        )
    };
    let rules: String = (0..50).map(rule).collect();
    let running = Running::start(&test, rules.trim_end(), "").await;
    running
        .until("all run", |status| status.rules.len() == 50 && status.rules.iter().all(|rule| rule.state == "live"))
        .await;
    let (code, _, error) = running.command(&["pause", "rule-number-7"]);
    assert_eq!(code, Some(0), "{error}");
    let status = running.status().await;
    assert!(
        status.summary.contains("Rule rule-number-7 is paused."),
        "it returns when that is visible: {}",
        status.summary
    );
    browser.client.goto(&format!("http://{}/", running.address)).await.unwrap();
    browser.until("rules", "return document.querySelectorAll('#rules tr').length === 50").await;
    for (width, name) in [(1280, "fifty-rules"), (500, "fifty-rules-phone")] {
        browser.client.set_window_size(width, 1500).await.unwrap();
        browser.until("it fits", "return document.documentElement.scrollWidth <= window.innerWidth").await;
        browser.picture(name).await;
    }
    browser.client.find(Locator::Id("filter")).await.unwrap().send_keys("paused").await.unwrap();
    browser.until("one", "return document.querySelectorAll('#rules tr').length === 1").await;
    assert!(browser.text("rules").await.contains("rule-number-7"));
    let (_, table, _) = running.command(&["status"]);
    assert!(table.lines().any(|line| line.contains("rule-number-7") && line.contains("paused")), "{table}");
    assert!(table.lines().any(|line| line.contains("RULE") && line.contains("STATE")), "{table}");
}

const FOCUSED: &str = "return document.activeElement";

#[tokio::test(flavor = "multi_thread")]
async fn the_page_says_what_is_wrong_is_read_by_keyboard_and_fits_a_phone() {
    let Some(browser) = Browser::start().await else { return };
    // A small oplog that drops unneeded entries within a second.
    let set = ReplicaSet::builder().oplog_mb(8).arg("--syncdelay").arg("1").start().await;
    let test = set.database().await;
    shop(&test).await;
    let slow = doc! {"failCommands": ["update"], "blockConnection": true, "blockTimeMS": 1500, "appName": "denormd", "namespace": format!("{}.log", test.name)};

    // Backfilling.
    let mut running = Running::prepare(&test, RULES, "");
    fail_point(&set, Some(slow.clone())).await;
    running.run().await;
    browser.client.goto(&format!("http://{}/", running.address)).await.unwrap();
    browser.until("a bar", "return !!document.querySelector('[role=progressbar]')").await;
    assert!(browser.text("causes").await.contains("backfilling"));
    browser.picture("backfilling").await;

    // Healthy.
    fail_point(&set, None).await;
    browser.until("well", "return document.getElementById('summary').innerText.startsWith('Not behind')").await;
    browser.until("events", "return document.getElementById('events').innerText.includes('backfill_done')").await;
    browser.until("a canary", "return document.getElementById('canary').innerText.includes('ago')").await;
    browser.until("a point", "return document.querySelectorAll('#lagbox path').length > 0").await;
    browser.until("told points", "return !document.getElementById('readout').innerText.includes('first point')").await;
    browser.until("drained", "return document.getElementById('t-lag').innerText === '0 s'").await;
    let applied = "return document.getElementById('summary').innerText === 'Not behind: every change is applied.'";
    browser.until("every change applied", applied).await;
    browser.picture("healthy").await;
    let dates = "return [...document.querySelectorAll('#events td:first-child small')].every(date => /^\\d{4}-\\d\\d-\\d\\d$/.test(date.innerText))";
    assert_eq!(browser.script(dates).await, true);
    // The selected hour, of which the daemon has run for a moment.
    assert!(browser.text("readout").await.starts_with("The history begins at "));
    let ticks =
        "return [...document.querySelectorAll('#lagbox text')].filter(text => text.textContent.includes(':')).length";
    assert!(browser.script(ticks).await.as_u64().unwrap() >= 5, "every ten minutes");

    // By keyboard alone: to the chart, along it, to a rule, and that rule alone.
    browser.press_until(Key::Tab, &format!("{FOCUSED}.id === 'lagbox'")).await;
    browser.press(Key::Left).await;
    browser.until("a time", "return /^\\d+:\\d\\d/.test(document.getElementById('readout').innerText)").await;
    browser.press(Key::Escape).await;
    browser.until("no time", "return !/^\\d+:\\d\\d/.test(document.getElementById('readout').innerText)").await;
    browser.press_until(Key::Tab, &format!("{FOCUSED}.dataset.rule === 'ip'")).await;
    browser.press(Key::Enter).await;
    browser
        .until("alone", "return document.querySelector('tr[data-rule=ip]').getAttribute('aria-selected') === 'true'")
        .await;
    assert_eq!(browser.script(&format!("{FOCUSED}.dataset.rule")).await, "ip", "the focus stays through a refresh");
    browser.press(Key::Enter).await;

    // No external resources, and nothing wider than a phone.
    let outside =
        "return performance.getEntriesByType('resource').filter(e => !e.name.startsWith(location.origin)).length";
    assert_eq!(browser.script(outside).await, 0);
    browser.client.set_window_size(500, 900).await.unwrap();
    let wide = "return document.documentElement.scrollWidth <= window.innerWidth";
    browser.until("it fits", wide).await;
    browser.picture("phone").await;
    browser.client.set_window_size(1280, 1500).await.unwrap();

    // Lagging.
    let held = doc! {"failCommands": ["update"], "errorCode": 112, "appName": "denormd", "namespace": format!("{}.log", test.name)};
    fail_point(&set, Some(held)).await;
    let hosts = test.database().collection::<Document>("hosts");
    hosts.update_one(doc! {}, doc! {"$set": {"ip": "10.0.0.2"}}).await.unwrap();
    browser.until("behind", "return document.getElementById('summary').innerText.startsWith('Behind by')").await;
    browser.until("since", "return document.querySelector('tr[data-rule=ip]').innerText.includes('since')").await;
    let whole = "return (scroll => scroll.scrollWidth <= scroll.clientWidth)(document.getElementById('rules').closest('.scroll'))";
    assert_eq!(browser.script(whole).await, true, "no column is cut");
    let most = "return Number(/At most (\\d+)/.exec(document.getElementById('readout').innerText)?.[1]) >= Number(/Behind by (\\d+)/.exec(document.getElementById('summary').innerText)[1])";
    browser.until("the chart agrees with the headline", most).await;
    tokio::time::sleep(Duration::from_secs(if std::env::var("SCREENSHOTS").is_ok() { 25 } else { 0 })).await;
    browser.picture("lagging").await;
    fail_point(&set, None).await;
    running.until("caught up", |status| status.lag_seconds.is_some_and(|lag| lag < 1.0)).await;

    // Degraded: its position is no longer in the oplog.
    running.stop();
    browser.until("offline", "return document.body.classList.contains('offline')").await;
    browser.picture("offline").await;
    run_over(&set).await;
    fail_point(&set, Some(slow)).await;
    running.run().await;
    running.until("degraded", |status| causes(status).contains(&"degraded")).await;
    browser.until("told", "return document.getElementById('causes').innerText.includes('degraded')").await;
    browser.picture("degraded").await;
    fail_point(&set, None).await;
    browser.until("repaired", "return document.getElementById('summary').innerText.startsWith('Not behind')").await;
}
