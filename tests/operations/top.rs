//! `denormd top`: frames drawn from statuses, compared with the screens in `tests/screens`, and one run on a terminal.
//! `DENORMD_WRITE_SCREENS=1` writes the screens.

use std::{fs, path::Path, process::Command};

use bson::doc;
use crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use denormd::{
    commands::top::{
        model::{Model, Next, Page, Sort},
        theme::Theme,
        view,
    },
    status::Status,
};
use denormd_mongo::error::{Error, Kind};
use ratatui::{Terminal, backend::TestBackend, buffer::Buffer, style::Color};
use serde_json::{Value, json};

use crate::support::{process::Program, running::Running};

/// 2026-11-22 20:31:05 UTC.
const NOW: i64 = 1_795_379_465_000;

fn rule(name: &str, more: &Value) -> Value {
    let mut rule = json!({
        "name": name, "state": "live", "source": "shop.parts", "target": "shop.products", "lag_seconds": 0.0, "max_lag_seconds": 60.0,
        "chain_lag_seconds": 0.0, "behind_since": null, "late_keys": 0, "keyed_by_target": false, "backfill": {"state": "none"},
        "degraded": false, "propagation": {"count": 120, "p50": 0.0042, "p95": 0.011, "p99": 0.025}, "targets_changed": 1000,
        "dead_letters": 0, "dead_letter_reasons": {},
    });
    merge(&mut rule, more);
    rule
}

fn merge(into: &mut Value, more: &Value) {
    let fields = more.as_object().unwrap().iter().map(|(name, value)| (name.clone(), value.clone()));
    into.as_object_mut().unwrap().extend(fields);
}

/// The status of a leader without a problem, but for the fields of `more`.
fn status(rules: &[Value], more: &Value) -> Status {
    let mut status = json!({
        "name": "shop", "version": "0.2.0", "role": "leader", "term": 3, "heard_seconds": null,
        "instances": [
            {"name": "db1:712", "role": "leader", "version": "0.2.0", "started": NOW, "other_rules": false, "this": true},
            {"name": "db2:40", "role": "standby", "version": "0.2.0", "started": NOW, "other_rules": false, "this": false},
        ],
        "started": NOW - 11_040_000, "now": NOW, "level": "ok", "summary": "Not behind: every change is applied.",
        "risk": "No: the remaining oplog window is 5 h 3 min.", "lag_seconds": 0.0, "behind_since": null,
        "current": {"as_of": "1795379464.7", "except": []}, "causes": [], "rules": rules, "streams": [],
        "oplog": {"readable": true, "headroom_seconds": 18_180.0}, "propagation": {"count": 240, "p50": 0.0042, "p95": 0.011, "p99": 0.025},
        "queue_depth": 0, "queue_capacity": 100_000, "events_per_second": 12.4, "targets_per_second": 60.1,
        "checkpoint_age_seconds": 0.8, "canary_age_seconds": 4.0, "dead_letters": 0, "errors": [],
    });
    merge(&mut status, more);
    serde_json::from_value(status).unwrap()
}

fn healthy() -> Status {
    status(
        &[rule("part-names", &json!({})), rule("part-info", &json!({})), rule("host-address", &json!({}))],
        &json!({}),
    )
}

fn behind() -> Status {
    let late = json!({"lag_seconds": 32.0, "chain_lag_seconds": 32.0, "behind_since": NOW - 32_000, "late_keys": 16});
    let fed = json!({"backfill": {"state": "running", "scanned": 121_000, "total": 336_776, "per_second": 2394.2, "eta_seconds": 90.0, "held_back": "majority_behind"}, "state": "backfilling"});
    let more = json!({
        "level": "critical", "summary": "Behind by 32 s on rule airline, for 32 s.", "lag_seconds": 32.0, "behind_since": NOW - 32_000,
        "risk": "Falling behind: the oplog position expires in 41 min 35 s, at 21:12 UTC.", "queue_depth": 982,
        "oplog": {"readable": true, "headroom_seconds": 2527.0, "lost_in_seconds": 2495.0},
        "causes": [
            {"cause": "oplog_short", "since": NOW - 27_000, "rules": [], "meaning": "the checkpoint will soon fall off the oplog",
             "advice": "remove the cause of the lag, or enlarge the oplog: db.adminCommand({replSetResizeOplog: 1, size: …})", "severe": true},
            {"cause": "catching_up", "since": NOW - 15_000, "rules": ["airline", "plane"], "meaning": "older changes are still being read",
             "advice": "wait: the lag falls. If it does not, look at the server's load", "severe": false},
        ],
    });
    status(&[rule("plane", &fed), rule("airline", &late), rule("departures", &json!({}))], &more)
}

fn blocked() -> Status {
    let stopped = json!({"state": "blocked", "lag_seconds": null, "propagation": {"count": 0}, "dead_letters": 2, "dead_letter_reasons": {"server error 121 (DocumentValidationFailure)": 2}});
    let more = json!({
        "level": "critical", "summary": "Rule host-label is blocked. The other rules are not behind.",
        "current": {"as_of": "1795379464.7", "except": ["host-label"]}, "dead_letters": 2,
        "causes": [{"cause": "adoption", "since": NOW - 7_100, "rules": ["host-label"],
            "meaning": "the first backfill of a rule would change existing data: it is blocked until an operator agrees",
            "advice": "`denormd plan` says what it would change; `denormd unblock RULE` agrees, or correct the rule in the config", "severe": true}],
        "errors": [{"first": NOW - 60_000, "last": NOW - 1_200, "count": 160, "rule": "host-label", "doing": "dead letter", "reason": "refused",
            "message": "server error 121 (DocumentValidationFailure)"}],
    });
    status(&[rule("part-names", &json!({})), rule("host-label", &stopped)], &more)
}

fn many() -> Status {
    let rules: Vec<Value> = (0..120)
        .map(|nth| match nth {
            77 => rule(
                "rule-077-with-a-rather-long-name-that-fills-the-column",
                &json!({"state": "paused", "lag_seconds": null}),
            ),
            100 => rule("rule-100", &json!({"lag_seconds": 61.0, "behind_since": NOW - 61_000})),
            nth => rule(&format!("rule-{nth:03}"), &json!({})),
        })
        .collect();
    status(
        &rules,
        &json!({"level": "behind", "summary": "Rule rule-077-with-a-rather-long-name-that-fills-the-column is paused. Behind by 1 min 1 s on rule rule-100, for 1 min 1 s."}),
    )
}

/// A view after two answers: each rule has written 100 targets in the four seconds between them.
fn model(answer: Status) -> Model {
    let mut model = Model::new("127.0.0.1:9464".to_owned(), Theme::PLAIN, NOW - 5000);
    let mut before = Status { now: NOW - 4000, ..answer.clone() };
    before.rules.iter_mut().for_each(|rule| rule.targets_changed -= 100);
    model.take(Ok(before), NOW - 4000);
    model.take(Ok(answer), NOW);
    model
}

fn refused() -> Error {
    Error::new(Kind::Connection, "no denormd answers at 127.0.0.1:9464: connection refused")
        .hint("is `denormd run` up?")
}

fn frame(model: &Model, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, model)).unwrap();
    terminal.backend().buffer().clone()
}

fn text(buffer: &Buffer) -> String {
    let row =
        |y: u16| (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..buffer.area.height).map(|y| row(y) + "\n").collect()
}

fn press(model: &mut Model, keys: &str) -> Next {
    let mut next = Next::Draw;
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\u{1b}' => KeyCode::Esc,
            '>' => KeyCode::PageDown,
            key => KeyCode::Char(key),
        };
        next = model.event(&Event::Key(KeyEvent::new(code, KeyModifiers::NONE)));
    }
    next
}

/// Compares a frame with the screen of this name.
fn screen(name: &str, model: &Model, (width, height): (u16, u16)) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/screens").join(format!("{name}.txt"));
    let found = text(&frame(model, width, height));
    if std::env::var_os("DENORMD_WRITE_SCREENS").is_some() {
        fs::write(&path, &found).unwrap();
    }
    assert_eq!(found, fs::read_to_string(&path).unwrap_or_default(), "{name}");
}

#[test]
fn each_state_has_its_screen() {
    screen("healthy", &model(healthy()), (80, 24));
    screen("healthy-wide", &model(healthy()), (140, 40));
    screen("healthy-narrow", &model(healthy()), (60, 24));
    screen("behind", &model(behind()), (80, 24));
    screen("behind-wide", &model(behind()), (140, 40));
    screen("behind-narrow", &model(behind()), (60, 24));
    screen("blocked", &model(blocked()), (80, 24));
    screen("many", &model(many()), (80, 24));
}

#[test]
fn without_an_answer_the_last_state_stays_and_is_said_to_be_unknown() {
    let mut model = model(healthy());
    model.take(Err(refused()), NOW + 32_000);
    screen("unknown", &model, (80, 24));
    screen("unknown-wide", &model, (140, 40));
    let shown = text(&frame(&model, 80, 24));
    assert!(!shown.lines().any(|line| line.starts_with("Not behind")), "no all-clear: {shown}");
    assert!(shown.contains("> part-names    was live "), "{shown}");
    press(&mut model, "d");
    screen("unknown-details", &model, (80, 24));
    // The daemon is back.
    model.take(Ok(healthy()), NOW + 33_000);
    assert_eq!(model.unknown(), None);
}

#[test]
fn a_daemon_that_is_silent_is_unknown_before_its_answer_is_given_up() {
    let mut model = model(healthy());
    model.now = NOW + 4_999;
    assert_eq!(model.unknown(), None);
    model.now = NOW + 5_000;
    assert_eq!(model.unknown().unwrap().since, NOW);
    assert!(text(&frame(&model, 80, 24)).contains("Unknown since 20:31:05 UTC, for 5.0 s: no answer from denormd"));
}

#[test]
fn a_daemon_that_has_never_answered_has_a_reason_and_no_figures() {
    let mut model = Model::new("127.0.0.1:9464".to_owned(), Theme::PLAIN, NOW);
    model.take(Err(refused()), NOW + 1000);
    screen("never", &model, (80, 24));
}

#[test]
fn details_name_the_cause_the_advice_and_the_errors_of_the_rule() {
    let mut model = model(blocked());
    assert_eq!(press(&mut model, "\n"), Next::Draw);
    screen("details", &model, (80, 24));
    let shown = text(&frame(&model, 80, 24));
    let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("denormd unblock host-label"), "the rule's name is filled in: {shown}");
    press(&mut model, "j");
    assert!(text(&frame(&model, 80, 24)).contains("rule part-names, 2 of 2"));
    press(&mut model, "\u{1b}");
    assert_eq!(model.page, Page::Rules);
    model = self::model(behind());
    press(&mut model, "d");
    screen("details-short", &model, (80, 16));
    press(&mut model, ">");
    screen("details-scrolled", &model, (80, 16));
}

#[test]
fn keys_select_sort_help_and_quit() {
    let mut model = model(many());
    let names = |model: &Model| model.rules().iter().take(2).map(|rule| rule.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&model), ["rule-077-with-a-rather-long-name-that-fills-the-column", "rule-100"], "problems first");
    press(&mut model, "j");
    press(&mut model, "s");
    assert_eq!(model.sort, Sort::Lag);
    assert_eq!(names(&model)[0], "rule-100");
    assert_eq!(model.selected(), 0, "the selected rule stays selected");
    press(&mut model, "ss");
    assert_eq!((names(&model)[0].as_str(), model.selected()), ("rule-000", 100));
    screen("many-scrolled", &model, (80, 24));
    press(&mut model, "G");
    assert_eq!(model.selected(), 119);
    screen("many-end", &model, (80, 24));
    press(&mut model, "gk");
    assert_eq!(model.selected(), 0);
    press(&mut model, "?");
    screen("help", &model, (80, 24));
    assert_eq!(press(&mut model, "\u{1b}"), Next::Draw, "it leaves the help first");
    assert_eq!(press(&mut model, "\u{1b}"), Next::Quit);
    assert_eq!(press(&mut model, "q"), Next::Quit);
    let interrupt = Event::Key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
    assert_eq!(model.event(&interrupt), Next::Quit);
    assert_eq!(model.event(&Event::Resize(10, 10)), Next::Draw);
}

#[test]
fn writes_per_second_are_counted_between_answers() {
    let mut model = Model::new("127.0.0.1:9464".to_owned(), Theme::PLAIN, NOW);
    model.take(Ok(healthy()), NOW);
    assert_eq!(model.rate("part-names"), None, "one answer is not enough");
    let later = |changed: u64, seconds: i64, more: &Value| {
        let mut all = json!({"now": NOW + seconds * 1000});
        merge(&mut all, more);
        status(&[rule("part-names", &json!({"targets_changed": changed}))], &all)
    };
    model.take(Ok(later(1100, 4, &json!({}))), NOW + 4_000);
    assert_eq!(model.rate("part-names"), Some(25.0));
    model.take(Ok(later(1100, 30, &json!({}))), NOW + 30_000);
    assert_eq!(model.rate("part-names"), None, "only the last ten seconds count");
    model.take(Ok(later(1200, 31, &json!({}))), NOW + 31_000);
    assert_eq!(model.rate("part-names"), Some(100.0));
    model.take(Ok(later(3, 32, &json!({}))), NOW + 32_000);
    assert_eq!(model.rate("part-names"), None, "another leader counts from zero");
    model.take(Ok(later(9, 33, &json!({"heard_seconds": 6.0}))), NOW + 33_000);
    assert_eq!(model.rate("part-names"), None, "the leader has not been heard");
    assert!(text(&frame(&model, 80, 24)).contains("Writes/s not known"));
}

/// Colours, and without them the same text with marks and bold.
#[test]
fn colours_only_where_they_are_wanted() {
    let colours = |model: &Model| {
        let buffer = frame(model, 80, 24);
        let used = buffer.content.iter().filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset).count();
        (used, text(&buffer))
    };
    let mut coloured = model(blocked());
    coloured.theme = Theme::COLOURED;
    let ((none, plain), (some, same)) = (colours(&model(blocked())), colours(&coloured));
    assert_eq!(none, 0);
    assert!(some > 50, "{some}");
    assert_eq!(plain, same);
    coloured.take(Err(refused()), NOW + 1000);
    let buffer = frame(&coloured, 80, 24);
    assert_eq!(buffer[(0, 1)].fg, Color::Red, "unknown is red");
    assert!(buffer.content.iter().all(|cell| cell.fg != Color::Green), "and nothing is green");
}

/// No size makes it panic, and names and messages cannot send control characters.
#[test]
fn any_size_and_any_text_are_drawn() {
    let mut hostile = rule("a\u{1b}[2Jb\n名前", &json!({"source": "x\u{7}y"}));
    merge(&mut hostile, &json!({"state": "blocked"}));
    for (width, height) in [(1, 1), (10, 3), (19, 5), (40, 10), (60, 7), (300, 80)] {
        for answer in
            [healthy(), behind(), blocked(), many(), status(&[hostile.clone()], &json!({})), status(&[], &json!({}))]
        {
            for keys in ["", "d", "?", "jjd>"] {
                let mut model = model(answer.clone());
                press(&mut model, keys);
                let shown = text(&frame(&model, width, height));
                assert!(!shown.chars().any(|c| c.is_control() && c != '\n'), "{shown:?}");
            }
        }
    }
}

/// The output of `tests/terminal.py`.
fn on_a_terminal(running: &Running, steps: &Value) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/terminal.py");
    let mut command = Command::new("python3");
    command.arg(script).args(["80", "24", &steps.to_string(), env!("CARGO_BIN_EXE_denormd"), "top"]);
    command.args(["--address", &running.address.to_string(), "--config", "/nonexistent.yaml"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_terminal_it_follows_a_daemon_and_leaves_the_terminal_as_it_was() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("customers").insert_one(doc! {"_id": 1, "name": "Ada"}).await.unwrap();
    db.collection("orders").insert_one(doc! {"_id": 10, "customer": 1}).await.unwrap();
    let rule = "  - { name: customer-name, copy: { source: customers, target: orders, match: { customer: _id }, set: { customer_name: $name } } }";
    let running = Running::start(&test, rule, "").await;
    running.until("the backfill is done", |status| status.rules.iter().all(|rule| rule.state == "live")).await;

    let daemon = running.id();
    let seen = on_a_terminal(
        &running,
        &json!([
            ["> customer-name  live", {"keys": "d"}],
            ["rule customer-name, 1 of 1", {"keys": "\u{1b}"}],
            ["> customer-name  live", {"stop": daemon}],
            ["> customer-name  was live", {"go": daemon}],
            ["> customer-name  live", {"keys": "q"}],
        ]),
    );
    assert_eq!(seen["missed"], json!([]), "{}", seen["last"]);
    assert_eq!(seen["code"], 0, "{seen:#}");
    assert_eq!(seen["restored"], true, "{seen:#}");
    assert!(seen["screens"][3].as_str().unwrap().contains("Unknown since"), "{seen:#}");

    let seen = on_a_terminal(&running, &json!([["> customer-name", {"keys": "\u{3}"}]]));
    assert_eq!((seen["code"].as_i64(), &seen["restored"]), (Some(0), &json!(true)), "Ctrl-C quits: {seen:#}");
}

#[tokio::test]
async fn without_a_terminal_it_says_what_to_use_instead() {
    let program = Program::new("");
    for (arguments, hint) in [
        (vec!["top", "--address", "127.0.0.1:9"], "watch -n 2 denormd status"),
        (vec!["top", "--output", "json"], "denormd status --output json"),
    ] {
        let printed = program.run(&arguments).await;
        assert_eq!(printed.code, 2, "{}", printed.err);
        assert!(printed.err.contains(hint), "{}", printed.err);
        assert_eq!(printed.out, "");
    }
}
