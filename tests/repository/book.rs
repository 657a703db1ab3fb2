//! The pages of the documentation, followed exactly: each rule on the documents before and after it, each command as a
//! reader types it. `DENORMD_WRITE_PAGES=1` writes the output of the commands into the pages where it differs.

use std::{
    collections::BTreeMap,
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use bson::{Bson, Document, doc};
use denormd_engine::metrics::Cause;
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_show::shop;
use mongodb::Database;
use serde_json::Value;

use crate::support::{
    daemon::PATIENCE,
    process::Program,
    running::{Running, Started},
    script::found_by,
};

/// A fenced block of a page.
struct Block {
    language: String,
    text: String,
    /// The number of its first line, from 0.
    line: usize,
}

fn page(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name)
}

fn blocks(text: &str) -> Vec<Block> {
    let (mut blocks, mut open): (Vec<Block>, Option<Block>) = (Vec::new(), None);
    for (number, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(language), None) => {
                open = Some(Block { language: language.to_owned(), text: String::new(), line: number + 1 });
            }
            (None, Some(block)) => block.text.extend([line, "\n"]),
            (None, None) => {}
        }
    }
    blocks
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn indented(text: &str) -> String {
    format!("  {}\n", text.trim_end().replace('\n', "\n  "))
}

/// The pages in a folder of the repository.
fn pages_in(folder: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(page(folder)).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

/// Pages whose rules are followed by the documents before and after.
fn pages_of_rules() -> Vec<PathBuf> {
    [pages_in("guides"), vec![page("concepts.md"), page("cookbook.md"), page("../README.md")]].concat()
}

#[tokio::test]
async fn each_rule_makes_of_its_documents_what_the_page_says() {
    let mut rules_tried = 0;
    for name in pages_of_rules() {
        let (text, name) = (fs::read_to_string(&name).unwrap(), name.display());
        let mut rules: Option<(Program, usize)> = None;
        for Block { text, line, .. } in blocks(&text).into_iter().filter(|block| block.language == "yaml") {
            let at = format!("{name}:{}", line + 1);
            if yaml(&text).is_array() {
                assert!(rules.is_none_or(|(_, cases)| cases > 0), "{at}: the rules before have no documents");
                let program = Program::new(&format!(
                    "mongodb: {{ uri: mongodb://localhost, database: app }}\nrules:\n{}",
                    indented(&text)
                ));
                let planned = program.run(&["plan", "--offline"]).await;
                assert_eq!(planned.code, 0, "{at}: {}", planned.err);
                rules_tried += yaml(&text).as_array().unwrap().len();
                rules = Some((program, 0));
                continue;
            }
            let Some((program, cases)) = &mut rules else { panic!("{at}: documents, and no rules before them") };
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("cases.yaml");
            fs::write(&file, format!("cases:\n- name: {at:?}\n{}", indented(&text))).unwrap();
            let tested = program.run(&["test", file.to_str().unwrap()]).await;
            assert_eq!(tested.code, 0, "{at}: {}{}", tested.out, tested.err);
            *cases += 1;
        }
        assert!(rules.is_none_or(|(_, cases)| cases > 0), "{name}: the last rules have no documents");
    }
    assert!(rules_tried > 20, "{rules_tried}");
}

/// A reader who follows a page, on a server and in a folder of their own.
struct Reader {
    page: PathBuf,
    /// Ends with the reader.
    _set: ReplicaSet,
    database: Database,
    folder: tempfile::TempDir,
    environment: BTreeMap<String, String>,
    daemon: Option<Started>,
    code: i32,
}

impl Reader {
    async fn new(name: &str, database: &str) -> Self {
        let set = ReplicaSet::start(1).await;
        let database = set.client().await.database(database);
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let folder = tempfile::tempdir().unwrap();
        let environment = [
            ("DENORMD__MONGODB__URI", set.uri()),
            ("DENORMD__HTTP__LISTEN", format!("127.0.0.1:{port}")),
            ("DENORMD__LOG__FORMAT", "text".to_owned()),
        ];
        let environment = environment.map(|(name, value)| (name.to_owned(), value)).into();
        Self { page: page(name), _set: set, database, folder, environment, daemon: None, code: 0 }
    }

    /// Puts a file of the repository into the folder.
    fn has(self, file: &str, name: &str) -> Self {
        let to = self.folder.path().join(name);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(page("..").join(file), to).unwrap();
        self
    }

    /// Follows all steps of the page, and compares the results.
    async fn follow(mut self) {
        let text = fs::read_to_string(&self.page).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        // Number of lines by which the blocks so far have grown.
        let mut moved: isize = 0;
        let writes = std::env::var_os("DENORMD_WRITE_PAGES").is_some();
        for block in blocks(&text) {
            let at = format!("{}:{}", self.page.display(), block.line + 1);
            match block.language.as_str() {
                "yaml" if block.text.starts_with("# ") => self.write(&block.text),
                "js" => self.mongosh(&block.text, &at).await,
                "text" => {
                    let printed = self.console(&block.text, &at, writes);
                    let first = block.line.checked_add_signed(moved).unwrap();
                    let old = block.text.lines().count();
                    let new: Vec<String> = printed.lines().map(str::to_owned).collect();
                    moved += isize::try_from(new.len()).unwrap() - isize::try_from(old).unwrap();
                    lines.splice(first..first + old, new);
                }
                language if language.ends_with(" ignore") => {}
                _ => assert!(!block.text.contains("denormd "), "{at}: a command that is not run"),
            }
        }
        if writes {
            fs::write(&self.page, lines.join("\n") + "\n").unwrap();
        }
    }

    /// Writes a file; its text begins with its name, or with `more of` and its name.
    fn write(&self, text: &str) {
        let (first, rest) = text.split_once('\n').unwrap();
        let name = first.strip_prefix("# ").unwrap_or_else(|| panic!("no name of a file: {first}"));
        if let Some(name) = name.strip_prefix("more of ") {
            let path = self.folder.path().join(name);
            let old = fs::read_to_string(&path).unwrap();
            fs::write(path, format!("{old}\n{rest}")).unwrap();
        } else {
            let path = self.folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    async fn mongosh(&self, text: &str, at: &str) {
        for Statement { collection, method, arguments, returns } in statements(text) {
            if method == "runCommand" {
                self.database.run_command(document(&arguments[0])).await.unwrap();
                continue;
            }
            let collection = self.database.collection::<Document>(&collection);
            let argument = |nth: usize| document(arguments.get(nth).unwrap_or(&Value::Object(serde_json::Map::new())));
            match method.as_str() {
                "insertOne" => drop(collection.insert_one(argument(0)).await.unwrap()),
                "insertMany" => {
                    let documents = arguments[0].as_array().unwrap().iter().map(document);
                    collection.insert_many(documents).await.unwrap();
                }
                "updateOne" => drop(collection.update_one(argument(0), argument(1)).await.unwrap()),
                "updateMany" => drop(collection.update_many(argument(0), stages(&arguments[1])).await.unwrap()),
                "deleteOne" => drop(collection.delete_one(argument(0)).await.unwrap()),
                "aggregate" => drop(collection.aggregate(stages(&arguments[0])).await.unwrap()),
                "drop" => collection.drop().await.unwrap(),
                "findOne" => {
                    let (expected, begun) =
                        (returns.unwrap_or_else(|| panic!("{at}: what it returns?")), Instant::now());
                    loop {
                        let found = collection.find_one(argument(0)).projection(argument(1)).await.unwrap();
                        let found = found.map_or(Value::Null, |found| Bson::Document(found).into_relaxed_extjson());
                        if found == yaml(&expected) {
                            break;
                        }
                        assert!(begun.elapsed() < PATIENCE, "{at}: {found:#}\n{}", self.log());
                        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    }
                }
                other => panic!("{at}: {other}"),
            }
        }
    }

    /// Runs each command, and returns the block with their output where it differs from the page.
    fn console(&mut self, text: &str, at: &str, writes: bool) -> String {
        let mut printed = String::new();
        for (command, expected) in commands(text) {
            let begun = Instant::now();
            // A state that takes time to be reached is requested again; a change is made once.
            let looks = ["status", "check", "explain", "events"]
                .iter()
                .any(|verb| command.starts_with(&format!("denormd {verb}")));
            let patience = if writes { PATIENCE / 60 } else { PATIENCE };
            let found = loop {
                let found = self.command(&command, &expected);
                if matches(&expected, &found) || !looks || begun.elapsed() > patience {
                    break found;
                }
                std::thread::sleep(std::time::Duration::from_millis(200));
                self.code = 0;
            };
            let right = matches(&expected, &found);
            assert!(right || writes, "{at}: $ {command}\n{found}\n--- expected\n{expected}\n--- log\n{}", self.log());
            printed.push_str(&format!("$ {command}\n"));
            printed.push_str(if right { &expected } else { &found });
        }
        printed
    }

    fn command(&mut self, command: &str, expected: &str) -> String {
        if command == "echo $?" {
            return format!("{}\n", std::mem::take(&mut self.code));
        }
        assert_eq!(self.code, 0, "before {command}");
        if let Some((name, value)) = command.strip_prefix("export ").and_then(|rest| rest.split_once('=')) {
            self.environment.insert(name.to_owned(), value.to_owned());
            return String::new();
        }
        if command == "denormd run" {
            return self.run(expected);
        }
        if command.starts_with("git ") {
            // tests/operations/diff.rs compares it.
            return expected.to_owned();
        }
        let output = self.shell(&format!("exec 2>&1\n{command}")).output().unwrap();
        self.code = output.status.code().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn shell(&self, command: &str) -> Command {
        let programs = Path::new(env!("CARGO_BIN_EXE_denormd")).parent().unwrap().display();
        let path = format!("{programs}:{}", std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).env("PATH", path).envs(&self.environment);
        shell.current_dir(self.folder.path()).stdin(Stdio::null());
        shell
    }

    /// Starts the daemon, and returns its log once it contains the expected text.
    fn run(&mut self, expected: &str) -> String {
        let child = self.shell("exec denormd run >log 2>&1").spawn().unwrap();
        self.daemon = Some(Started(child));
        let begun = Instant::now();
        while !(self.log().contains("following changes") && matches(expected, &self.log())) {
            if begun.elapsed() > PATIENCE / 60 && std::env::var_os("DENORMD_WRITE_PAGES").is_some() {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        self.log()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

/// `db.COLLECTION.METHOD(ARGUMENTS)` or `db.runCommand(ARGUMENT)`, and its result according to the comment below it.
struct Statement {
    collection: String,
    method: String,
    arguments: Vec<Value>,
    returns: Option<String>,
}

fn statements(text: &str) -> Vec<Statement> {
    let mut parts: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        match (line.strip_prefix("//"), line.starts_with("db.")) {
            (Some(comment), _) => parts.last_mut().unwrap().1.push_str(comment),
            (None, true) => parts.push((line.to_owned(), String::new())),
            (None, false) => parts.last_mut().unwrap().0.push_str(line),
        }
    }
    let statement = |(call, comment): (String, String)| {
        let (name, arguments) = call.strip_prefix("db.").unwrap().split_once('(').unwrap();
        let (collection, method) = name.split_once('.').unwrap_or(("", name));
        // The arguments are JavaScript for mongosh, and also valid YAML flow syntax.
        let arguments = yaml(&format!("[{}]", arguments.trim_end().strip_suffix(')').unwrap()));
        Statement {
            collection: collection.to_owned(),
            method: method.to_owned(),
            arguments: arguments.as_array().unwrap().clone(),
            returns: Some(comment).filter(|comment| !comment.is_empty()),
        }
    };
    parts.into_iter().map(statement).collect()
}

fn document(value: &Value) -> Document {
    match Bson::try_from(value.clone()).unwrap() {
        Bson::Document(document) => document,
        other => panic!("{other} is no document"),
    }
}

fn stages(value: &Value) -> Vec<Document> {
    value.as_array().unwrap().iter().map(document).collect()
}

/// The commands of a block, each with its output.
fn commands(text: &str) -> Vec<(String, String)> {
    let mut commands: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        match line.strip_prefix("$ ") {
            Some(command) => commands.push((command.to_owned(), String::new())),
            None => commands.last_mut().unwrap().1.extend([line, "\n"]),
        }
    }
    commands
}

/// True if the output matches. `…` stands for anything, alone in its line for any number of lines; spaces, times,
/// durations and rates may differ.
fn matches(expected: &str, found: &str) -> bool {
    let (expected, found) = (words(expected), words(found));
    let (mut at, mut from, mut star) = (0, 0, None);
    while from < found.len() {
        if expected.get(at).is_some_and(|word| word == "…") {
            star = Some((at, from));
            at += 1;
        } else if expected.get(at) == Some(&found[from]) {
            (at, from) = (at + 1, from + 1);
        } else if let Some((before, begun)) = star {
            // The last `…` takes one more word.
            (at, from) = (before + 1, begun + 1);
            star = Some((before, begun + 1));
        } else {
            return false;
        }
    }
    expected[at..].iter().all(|word| word == "…")
}

fn words(text: &str) -> Vec<String> {
    const UNITS: [&str; 9] = ["ms", "s", "min", "h", "d", "targets/s", "events/s", "KB", "MB"];
    let mut words: Vec<String> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let mut rest = line.split_whitespace().peekable();
        while let Some(word) = rest.next() {
            let bare = word.trim_matches(['(', ')', ',', '.', ':']);
            let unit = rest.peek().map(|unit| unit.trim_end_matches([',', '.', ')', ':']));
            if bare.parse::<f64>().is_ok() && unit.is_some_and(|unit| UNITS.contains(&unit)) {
                rest.next();
                if words.last().is_none_or(|last| last != "DURATION") {
                    words.push("DURATION".to_owned());
                }
            } else if bare.len() > 7 && bare.chars().all(|c| c.is_ascii_digit() || "-:.TZ".contains(c)) {
                words.push("TIME".to_owned());
            } else {
                words.push(word.to_owned());
            }
        }
        if words.last().is_none_or(|last| last != "…") {
            words.push("\n".to_owned());
        }
    }
    words
}

#[tokio::test(flavor = "multi_thread")]
async fn the_quick_start_leads_where_it_says() {
    Reader::new("quick-start.md", "shop").await.follow().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tutorial_leads_where_it_says() {
    Reader::new("tutorial.md", "shop").await.follow().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hooks_are_replaced_as_the_page_says() {
    Reader::new("replace-hooks.md", "rocketchat").await.follow().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_prints_what_its_page_says() {
    let reader = Reader::new("commands.md", shop::DATABASE).await;
    shop::load(&reader.database).await;
    reader.has("config/shop.yaml", "shop.yaml").has("config/tests/shop.yaml", "tests/shop.yaml").follow().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_go_as_their_page_says() {
    let reader = Reader::new("operations.md", shop::DATABASE).await;
    let insert = async |collection: &str, documents: Vec<Document>| {
        reader.database.collection(collection).insert_many(documents).await.unwrap();
    };
    insert(
        "parts",
        [(7, "Spoke"), (8, "Hub"), (9, "Rim")].map(|(id, name)| doc! {"_id": id, "name": name, "price": id}).into(),
    )
    .await;
    let products =
        (1..=5).map(|id| doc! {"_id": id, "parts": [{"id": 7}, {"id": 8}, {"id": 9}], "spares": [7 + id % 3]});
    insert("products", products.collect()).await;
    let hosts = (1..=3).map(|id| doc! {"_id": id, "name": format!("web-{id}"), "ipaddr": format!("10.0.0.{id}")});
    insert("hosts", hosts.collect()).await;
    insert("logmsg", (1..=200).map(|id| doc! {"_id": id, "host": id % 4}).collect()).await;
    let reader = reader.has("config/shop.yaml", "config/shop.yaml");
    reader.has("config/tests/shop.yaml", "config/tests/shop.yaml").follow().await;
}

/// The two blocks of a language in "Read your writes": the definition, and its use.
fn snippets(language: &str, running: &Running) -> [String; 2] {
    let text = fs::read_to_string(page("read-your-writes.md")).unwrap();
    let blocks = blocks(&text).into_iter().filter(|block| block.language == language);
    // A busy machine may take longer than a page should.
    let text = |block: Block| {
        let text = block.text.replace("127.0.0.1:9464", &running.address.to_string());
        text.replace("timeout=5", "timeout=120").replace("timeout = 5", "timeout = 120")
    };
    blocks.map(text).collect::<Vec<_>>().try_into().unwrap()
}

async fn customers(test: &TestDb) -> Running {
    let db = test.database();
    db.collection("customers").insert_one(doc! {"_id": 1, "name": "Ada"}).await.unwrap();
    db.collection("orders").insert_one(doc! {"_id": 10, "customer": 1}).await.unwrap();
    let rule = "  - { name: customer-name, copy: { source: customers, target: orders, match: { customer: _id }, set: { customer_name: $name } } }";
    let running = Running::start(test, rule, "").await;
    running
        .until("the rule is live", |status| {
            status.rules.iter().all(|rule| rule.state == "live") && !status.rules.is_empty()
        })
        .await;
    running
}

fn succeeds(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn in_python_writes_are_read() {
    let Some(python) = found_by("pymongo_python.py") else { return };
    let test = denormd_fixture::database().await;
    let running = customers(&test).await;
    let [defined, used] = snippets("python", &running);
    let begun = format!("import pymongo\nclient = pymongo.MongoClient({:?})\nshop = client[{:?}]", test.uri, test.name);
    let seen = "assert applied and order['customer_name'] == 'Ada Lovelace', order";
    let never = "assert wait_for('4000000000.1', timeout=0.2) is False";
    let script = [&*defined, &begun, &used, seen, never].join("\n");
    succeeds(Command::new(python).args(["-c", &script]));
}

#[tokio::test(flavor = "multi_thread")]
async fn in_node_writes_are_read() {
    let Some(packages) = found_by("node_mongodb.py") else { return };
    let test = denormd_fixture::database().await;
    let running = customers(&test).await;
    let [defined, used] = snippets("javascript", &running);
    let script = format!(
        "{defined}
        (async () => {{
            const client = await require('mongodb').MongoClient.connect({:?}, {{ useUnifiedTopology: true }});
            const shop = client.db({:?});
            {used}
            require('assert').strictEqual(order.customer_name, 'Ada King');
            require('assert').deepStrictEqual([applied, await waitFor('4000000000.1', 0.2)], [true, false]);
            await client.close();
        }})().catch(error => {{ console.error(error); process.exit(1); }});",
        test.uri, test.name
    );
    succeeds(Command::new("node").args(["-e", &script]).env("NODE_PATH", packages));
}

/// The commands in a text: `denormd …` between backquotes, and in blocks.
fn written_commands(text: &str) -> Vec<String> {
    let spans = text.split('`').skip(1).step_by(2);
    let blocks = blocks(text).into_iter().flat_map(|block| block.text.lines().map(str::to_owned).collect::<Vec<_>>());
    let lines = blocks.map(|line| line.trim_start_matches("$ ").to_owned());
    // The title of a screen of `top` begins like a command.
    let is_command = |text: &String| text.starts_with("denormd ") && !text.starts_with("denormd default: ");
    lines.chain(spans.map(str::to_owned)).filter(is_command).collect()
}

#[tokio::test]
async fn the_commands_that_pages_name_are_those_that_there_are() {
    let program = Program::new("");
    let mut known: BTreeMap<Vec<String>, String> = BTreeMap::new();
    for path in [pages_in("."), pages_in("guides"), vec![page("../README.md"), page("../deploy/README.md")]].concat() {
        for command in written_commands(&fs::read_to_string(&path).unwrap()) {
            let end = command.find(['|', '>', '#', '&', '…']).unwrap_or(command.len());
            let mut words: Vec<&str> = command[..end].split_whitespace().skip(1).collect();
            let named = 1 + usize::from(words[0] == "dead-letters" && words.len() > 1);
            let options = words.split_off(named.min(words.len()));
            let key: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            if !known.contains_key(&key) {
                words.push("--help");
                let printed = program.run(&words).await;
                assert_eq!(printed.code, 0, "{}: {command}: {}", path.display(), printed.err);
                known.insert(key.clone(), printed.out);
            }
            for option in options.iter().filter(|word| word.starts_with("--")) {
                let option = option.trim_matches(['[', ']']).split('=').next().unwrap();
                assert!(known[&key].contains(option), "{}: {command}: no {option}", path.display());
            }
        }
    }
    assert!(known.len() > 15, "{:?}", known.keys());
}

#[test]
fn troubleshooting_has_every_cause() {
    let text = fs::read_to_string(page("troubleshooting.md")).unwrap();
    for cause in Cause::ALL {
        assert!(text.contains(&format!("`{}`", cause.name())), "{}", cause.name());
    }
}

#[test]
fn pages_are_compared_but_for_figures_of_one_run() {
    assert!(matches("up 3.0 s, p50 -\n", "up  1 min 4 s, p50 -\n"));
    assert!(matches("a\n…\nc d … f\n", "a\nb\nb\nc d e e f\n"));
    assert!(!matches("a\n…\nc\n", "a\nb\n"));
    assert!(!matches("3 differ\n", "4 differ\n"));
    assert!(!matches("a\n", "a\nb\n"));
    assert!(matches(
        "as of 2026-11-23 01:19:56 UTC (1795396796.1)\n",
        "as of 2027-11-23 01:19:57 UTC (1795396799.2)\n"
    ));
}
