//! `make demo`: a small shop whose copied fields stay in sync, before and after side by side.

use std::time::Duration;

use bson::{Bson, Document, doc};
use denormd_fixture::ReplicaSet;
use denormd_show::{
    daemon::Daemon,
    print::{bold, counted, dim, green, heading, red, side_by_side, time},
    progress::Progress,
    shop::{self, DATABASE, HOSTS, MESSAGES, PARTS, PRODUCTS},
};
use futures_util::TryStreamExt;
use mongodb::{Collection, Database};
use tokio::time::{Instant, sleep};

/// The number of rules in `config/shop.yaml`.
const RULES: usize = 3;

/// Time limit of each step: a longer one means that something is broken.
const LIMIT: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() {
    let started = Instant::now();
    heading("A shop on a throw-away MongoDB replica set");
    let set = ReplicaSet::start(1).await;
    let client = set.client().await;
    let shop = Shop { database: client.database(DATABASE) };
    shop.load().await;

    println!("\n{}   {}", bold("denormd plan --config config/shop.yaml --apply"), dim("creates what the rules need"));
    let mut daemon = Daemon::new("shop.yaml", &set.uri());
    for command in daemon.plan_apply() {
        println!("  {command}");
    }
    println!(
        "\n{}            {}",
        bold("denormd run --config config/shop.yaml"),
        dim("fills in what is there, then follows every change")
    );
    let progress = Progress::new(&client, DATABASE, RULES);
    let begun = Instant::now();
    let first = shop.read("products", 1).await;
    daemon.start();
    progress.wait_backfilled().await;
    println!(
        "  {} and {} filled in after {}\n",
        counted(size(PRODUCTS), "product"),
        counted(size(MESSAGES), "log message"),
        bold(&time(begun.elapsed()))
    );
    side_by_side(
        "product 1 as the application wrote it",
        &first,
        "with the copied fields",
        &shop.read("products", 1).await,
    );

    shop.rename_part().await;
    shop.reprice_spare().await;
    shop.move_host().await;
    shop.new_message().await;
    shop.delete_part().await;
    shop.kill9(&mut daemon, &progress).await;
    daemon.stop().await;
    heading(&format!("Done in {}. What to try next", time(started.elapsed())));
    println!("  make flights             336,776 real flights, every one compared with an independent computation");
    println!("  make flights KILLS=5     the same, with kill -9 at five random moments");
    println!();
    println!("  Your own data: copy config/shop.yaml to mine.yaml, name your collections and fields in it, then");
    println!("  target/try/denormd plan --offline --config mine.yaml   checks the config alone");
    println!("  target/try/denormd plan --config mine.yaml             asks the cluster, changes nothing");
    println!("  target/try/denormd plan --config mine.yaml --apply     creates the indexes it names");
    println!("  target/try/denormd run --config mine.yaml              keeps the copies in sync");
    println!("  cargo build --release                                  faster, and slower to build: target/release");
}

fn size(number: i32) -> usize {
    usize::try_from(number).unwrap_or_default()
}

struct Shop {
    database: Database,
}

impl Shop {
    fn collection(&self, name: &str) -> Collection<Document> {
        self.database.collection(name)
    }

    async fn load(&self) {
        shop::load(&self.database).await;
        println!(
            "  {}, {}, {}, {}",
            counted(size(PARTS), "part"),
            counted(size(PRODUCTS), "product"),
            counted(size(HOSTS), "host"),
            counted(size(MESSAGES), "log message")
        );
    }

    async fn read(&self, collection: &str, id: i32) -> Document {
        self.collection(collection).find_one(doc! {"_id": id}).await.expect("a read").expect("a document")
    }

    /// Reads a document every millisecond until it has the expected content; returns it, and the time since
    /// `acknowledged`.
    async fn until(
        &self,
        collection: &str,
        id: i32,
        acknowledged: Instant,
        wanted: impl Fn(&Document) -> bool,
    ) -> (Document, Duration) {
        loop {
            let document = self.read(collection, id).await;
            if wanted(&document) {
                return (document, acknowledged.elapsed());
            }
            assert!(acknowledged.elapsed() < LIMIT, "{collection} {id} was not updated within {LIMIT:?}: {document}");
            sleep(Duration::from_millis(1)).await;
        }
    }

    async fn update(&self, collection: &str, id: i32, set: Document) -> Instant {
        self.collection(collection).update_one(doc! {"_id": id}, doc! {"$set": set}).await.expect("an update");
        Instant::now()
    }

    /// Waits until no document of a collection matches the filter.
    async fn until_none(&self, collection: &str, stale: Document, since: Instant) -> Duration {
        while self.collection(collection).find_one(stale.clone()).await.expect("a read").is_some() {
            assert!(since.elapsed() < LIMIT, "{collection} still has {stale} after {LIMIT:?}");
            sleep(Duration::from_millis(1)).await;
        }
        since.elapsed()
    }

    /// The id of a part of product 1, by its position in an array.
    async fn id_in(&self, array: &str, place: usize) -> i32 {
        let product = self.read("products", 1).await;
        match &product.get_array(array).expect("an array")[place] {
            Bson::Document(part) => part.get_i32("id").expect("an id"),
            id => id.as_i32().expect("an id"),
        }
    }

    async fn rename_part(&self) {
        let id = self.id_in("parts", 0).await;
        title(
            &format!("db.parts.updateOne({{ _id: {id} }}, {{ $set: {{ name: \"Leather saddle\" }} }})"),
            "its name, beside its id, in every product",
        );
        let others = self.collection("products").count_documents(doc! {"parts.id": id}).await.expect("a count");
        let before = self.read("products", 1).await;
        let renamed = self.update("parts", id, doc! {"name": "Leather saddle"}).await;
        let (after, took) = self.until("products", 1, renamed, |product| shows(product, "Leather saddle")).await;
        let stale = doc! {"parts": {"$elemMatch": {"id": id, "name": {"$ne": "Leather saddle"}}}};
        let all = self.until_none("products", stale, renamed).await;
        side_by_side("product 1 before", &before, &format!("after {}", time(took)), &after);
        println!("  {}", dim(&format!("all {others} products that list it: {}", time(all))));
    }

    async fn reprice_spare(&self) {
        let id = self.id_in("spares", 1).await;
        title(
            &format!("db.parts.updateOne({{ _id: {id} }}, {{ $set: {{ price: 99 }} }})"),
            "part_info, kept beside a plain array of ids",
        );
        let before = self.read("products", 1).await;
        let changed = self.update("parts", id, doc! {"price": 99}).await;
        let wanted = |product: &Document| {
            let infos = product.get_array("part_info").map(Vec::as_slice).unwrap_or_default();
            infos.iter().filter_map(Bson::as_document).any(|info| info.get("price") == Some(&Bson::Int32(99)))
        };
        let (after, took) = self.until("products", 1, changed, wanted).await;
        side_by_side("product 1 before", &before, &format!("after {}", time(took)), &after);
    }

    async fn move_host(&self) {
        title(
            "db.hosts.updateOne({ _id: 7 }, { $set: { ipaddr: \"192.168.7.7\" } })",
            "the address in each log message of the host",
        );
        let messages = self.collection("logmsg").count_documents(doc! {"host": 7}).await.expect("a count");
        let before = self.read("logmsg", 6).await;
        let moved = self.update("hosts", 7, doc! {"ipaddr": "192.168.7.7"}).await;
        let (after, took) =
            self.until("logmsg", 6, moved, |message| message.get_str("ipaddr").ok() == Some("192.168.7.7")).await;
        let all = self.until_none("logmsg", doc! {"host": 7, "ipaddr": {"$ne": "192.168.7.7"}}, moved).await;
        side_by_side("log message 6 before", &before, &format!("after {}", time(took)), &after);
        println!("  {}", dim(&format!("all {messages} messages of the host: {}", time(all))));
    }

    async fn new_message(&self) {
        title(
            "db.logmsg.insertOne({ _id: 0, host: 3, message: \"GET /new\" })",
            "a new message gets its host's fields",
        );
        let message = doc! {"_id": 0, "host": 3, "message": "GET /new"};
        self.collection("logmsg").insert_one(&message).await.expect("an insert");
        let (after, took) = self.until("logmsg", 0, Instant::now(), |message| message.contains_key("ipaddr")).await;
        side_by_side("as inserted", &message, &format!("after {}", time(took)), &after);
    }

    async fn delete_part(&self) {
        let id = self.id_in("parts", 2).await;
        title(&format!("db.parts.deleteOne({{ _id: {id} }})"), "a deleted part leaves no copy");
        let before = self.read("products", 1).await;
        self.collection("parts").delete_one(doc! {"_id": id}).await.expect("a delete");
        let gone = |product: &Document| {
            let with_name = |part: &Bson| {
                part.as_document().is_some_and(|part| part.get_i32("id").ok() == Some(id) && part.contains_key("name"))
            };
            let arrays = ["parts", "part_info"].into_iter().filter_map(|array| product.get_array(array).ok());
            !arrays.flatten().any(with_name)
        };
        let (after, took) = self.until("products", 1, Instant::now(), gone).await;
        side_by_side("product 1 before", &before, &format!("after {}", time(took)), &after);
    }

    /// Kills the daemon in the middle of changes, makes more changes while it is stopped, and compares every document
    /// afterwards.
    async fn kill9(&self, daemon: &mut Daemon, progress: &Progress) {
        title("kill -9 denormd", "while every part is renamed and every host moves");
        let mut changes = 0;
        for id in 1..=PARTS {
            self.update("parts", id, doc! {"name": format!("Part {id}, second edition")}).await;
            changes += 1;
            if id == PARTS / 3 {
                daemon.kill9();
                let [parts, messages] = self.stale().await;
                println!(
                    "  killed after {}; documents behind: {}, {}",
                    counted(changes, "change"),
                    counted(parts, "product"),
                    counted(messages, "log message")
                );
            }
            if id % 10 == 0 {
                let host = id / 10;
                self.update("hosts", host, doc! {"ipaddr": format!("172.16.0.{host}")}).await;
                changes += 1;
            }
        }
        self.collection("parts").delete_one(doc! {"_id": 2}).await.expect("a delete");
        let [parts, messages] = self.stale().await;
        println!(
            "  {} made in all, the last ones were not processed; behind: {}, {}",
            counted(changes + 1, "change"),
            counted(parts, "product"),
            counted(messages, "log message")
        );
        let started = Instant::now();
        daemon.start();
        let all = loop {
            if self.stale().await == [0, 0] {
                break started.elapsed();
            }
            assert!(started.elapsed() < LIMIT, "still behind after {LIMIT:?}: {:?}", self.stale().await);
            sleep(Duration::from_millis(1)).await;
        };
        progress.wait_caught_up().await;
        println!("  started again: up to date after {}", bold(&time(all)));
        let [parts, messages] = self.stale().await;
        let verdict = format!(
            "{} differences in {} and {}",
            parts + messages,
            counted(size(PRODUCTS), "product"),
            counted(size(MESSAGES) + 1, "log message")
        );
        println!("  {}", bold(&if parts + messages == 0 { green(&verdict) } else { red(&verdict) }));
        assert_eq!(parts + messages, 0, "differences are left; the daemon's log ends with\n{}", daemon.log_tail());
    }

    /// Number of products and log messages that differ from the rules' definitions, computed here from the sources
    /// alone.
    async fn stale(&self) -> [usize; 2] {
        let all = async |name: &str| -> Vec<Document> {
            self.collection(name).find(doc! {}).await.expect("a read").try_collect().await.expect("a read")
        };
        let by_id = |documents: Vec<Document>| -> std::collections::HashMap<i32, Document> {
            documents.into_iter().map(|document| (document.get_i32("_id").expect("an id"), document)).collect()
        };
        let (parts, hosts) = (by_id(all("parts").await), by_id(all("hosts").await));
        let right_product = |product: &&Document| {
            let listed = product.get_array("parts").expect("parts").iter().filter_map(Bson::as_document);
            let names = listed.clone().all(|part| {
                part.get("name") == parts.get(&part.get_i32("id").expect("an id")).and_then(|part| part.get("name"))
            });
            let spares = product.get_array("spares").expect("spares").iter().filter_map(|id| parts.get(&id.as_i32()?));
            let infos: Vec<Bson> =
                spares.map(|part| Bson::Document(doc! {"id": part.get("_id").cloned(), "name": part.get("name").cloned(), "price": part.get("price").cloned()})).collect();
            names && product.get_array("part_info").is_ok_and(|stored| *stored == infos)
        };
        let right_message = |message: &&Document| {
            let host = hosts.get(&message.get_i32("host").expect("a host"));
            let same = |copied: &str, field: &str| message.get(copied) == host.and_then(|host| host.get(field));
            same("ipaddr", "ipaddr") && same("hostname", "name")
        };
        let (products, messages) = (all("products").await, all("logmsg").await);
        let right = [products.iter().filter(right_product).count(), messages.iter().filter(right_message).count()];
        [products.len() - right[0], messages.len() - right[1]]
    }
}

/// True if a part of the product has this name.
fn shows(product: &Document, name: &str) -> bool {
    let parts = product.get_array("parts").map(Vec::as_slice).unwrap_or_default();
    parts.iter().filter_map(Bson::as_document).any(|part| part.get_str("name").ok() == Some(name))
}

fn title(command: &str, what: &str) {
    println!("\n{}   {}", bold(command), dim(what));
}
