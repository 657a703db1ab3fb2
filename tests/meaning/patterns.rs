//! Every example under `config/` has the effect that its comment describes: the original file is loaded, and only the
//! cluster, the database and the state database are the test's.

use std::{collections::BTreeSet, path::PathBuf, process::Command};

use bson::{Bson, DateTime, Document, bson, doc};
use denormd_fixture::TestDb;
use denormd_rules::config;
use mongodb::{Collection, Database};

use crate::support::daemon::{Daemon, all};

/// An example and its environment.
struct Example {
    daemon: Daemon,
    db: Database,
    // Dropped last, together with its databases.
    _test: TestDb,
}

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/config"))
}

/// The connection string of a user with exactly the privileges of `denormd role`, where the server requires
/// authentication (`make test-secure`). The user of the test performs the steps of `plan --apply`.
async fn least_user(test: &TestDb, name: &str, environment: &[(String, String)]) -> String {
    let config = folder().join(name).with_extension("yaml");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_denormd"));
        command.args(arguments).arg("--config").arg(&config).envs(environment.iter().cloned());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    run(&["plan", "--apply"]);
    let role: serde_json::Value =
        serde_json::from_slice(&run(&["role", "--name", &test.name, "--output", "json"])).unwrap();
    let role = Document::try_from(role.as_object().unwrap().clone()).unwrap();
    let admin = test.client.database("admin");
    admin.run_command(role).await.unwrap();
    let user = doc! {"createUser": &test.name, "pwd": "of-a-test", "roles": [&test.name]};
    admin.run_command(user).await.unwrap();
    let (_, hosts) = test.uri.split_once('@').unwrap();
    format!("mongodb://{}:of-a-test@{hosts}", test.name)
}

impl Example {
    /// Starts the daemon on `config/<name>.yaml`, after creating everything that `plan` finds missing.
    async fn start(name: &str) -> Self {
        let test = denormd_fixture::database().await;
        let mut environment = [
            ("DENORMD__MONGODB__URI".to_owned(), test.uri.clone()),
            ("DENORMD__MONGODB__DATABASE".to_owned(), test.name.clone()),
            ("DENORMD__STATE__DATABASE".to_owned(), format!("{}_state", test.name)),
        ];
        if test.uri.contains("authSource=") {
            // Among the databases of other tests, one that does not exist yet looks misspelt.
            test.database().create_collection("application").await.unwrap();
            environment[0].1 = least_user(&test, name, &environment).await;
        }
        let loaded =
            config::load(&[folder().join(name).with_extension("yaml")], &environment).unwrap_or_else(|e| panic!("{e}"));
        Self { daemon: Daemon::start_loaded(&loaded).await, db: test.database(), _test: test }
    }

    fn collection(&self, name: &str) -> Collection<Document> {
        self.db.collection(name)
    }

    async fn insert(&self, name: &str, documents: impl IntoIterator<Item = Document>) {
        self.collection(name).insert_many(documents).await.unwrap();
    }

    async fn set(&self, name: &str, id: impl Into<Bson>, fields: Document) {
        let done = self.collection(name).update_one(doc! {"_id": id.into()}, doc! {"$set": fields}).await.unwrap();
        assert_eq!(done.matched_count, 1);
    }

    async fn delete(&self, name: &str, id: impl Into<Bson>) {
        assert_eq!(self.collection(name).delete_one(doc! {"_id": id.into()}).await.unwrap().deleted_count, 1);
    }

    /// Every document of the collection, once the daemon is done.
    async fn settled(&self, name: &str) -> Vec<Document> {
        self.daemon.settled().await;
        all(&self.db, name).await
    }

    /// A field of every document, by `_id`.
    async fn field(&self, name: &str, field: &str) -> Vec<Bson> {
        self.settled(name)
            .await
            .iter()
            .map(|document| document.get(field).cloned().unwrap_or(bson!("(missing)")))
            .collect()
    }

    async fn stop(self) {
        self.daemon.stop().await;
    }
}

fn day(n: i64) -> DateTime {
    DateTime::from_millis(n * 86_400_000)
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses() {
    let example = Example::start("addresses").await;
    let address = |id: i32, person: i32, street: &str, city: &str| doc! {"_id": id, "person": person, "street": street, "city": city};
    let embedded = |id: i32, street: &str, city: &str| bson!({"id": id, "street": street, "city": city});
    example.insert("person", [doc! {"_id": 1, "name": "Kate Powell"}, doc! {"_id": 2, "name": "Jo"}]).await;
    example
        .insert(
            "address",
            [
                address(10, 1, "1 Some Street", "Boston"),
                address(11, 1, "9 Other Lane", "Athens"),
                address(12, 2, "5 Way", "Cork"),
            ],
        )
        .await;
    let (boston, athens, cork) = (
        embedded(10, "1 Some Street", "Boston"),
        embedded(11, "9 Other Lane", "Athens"),
        embedded(12, "5 Way", "Cork"),
    );
    assert_eq!(
        example.field("person", "addresses").await,
        [bson!([athens.clone(), boston.clone()]), bson!([cork.clone()])]
    );
    // Edited, and with it reordered.
    example.set("address", 11, doc! {"city": "Zagreb"}).await;
    let zagreb = embedded(11, "9 Other Lane", "Zagreb");
    assert_eq!(
        example.field("person", "addresses").await,
        [bson!([boston.clone(), zagreb.clone()]), bson!([cork.clone()])]
    );
    // Moved to another person, and one deleted.
    example.set("address", 10, doc! {"person": 2}).await;
    example.delete("address", 11).await;
    assert_eq!(example.field("person", "addresses").await, [bson!([]), bson!([boston.clone(), cork.clone()])]);
    // More than `max_elements`: a dead letter, and nothing else waits.
    example.insert("address", (100..201).map(|id| address(id, 1, "x", "y"))).await;
    example.set("address", 12, doc! {"city": "Bray"}).await;
    assert_eq!(example.field("person", "addresses").await, [bson!([]), bson!([boston, embedded(12, "5 Way", "Bray")])]);
    example.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn parts() {
    let example = Example::start("parts").await;
    example
        .insert(
            "parts",
            [
                doc! {"_id": "P1", "name": "grommet", "qty": 94},
                doc! {"_id": "P2", "name": "strut"},
                doc! {"_id": "P3", "name": "bolt"},
            ],
        )
        .await;
    example
        .insert("products", [
            doc! {"_id": 1, "name": "smoke shifter", "catalog_number": 1234, "parts": ["P2", "P1"], "spares": [{"id": "P1", "count": 2}]},
            doc! {"_id": 2, "name": "left-handed wrench", "catalog_number": 1000, "parts": ["P1"], "spares": []},
        ])
        .await;
    let info = |id: &str, name: &str| bson!({"id": id, "name": name});
    assert_eq!(
        example.field("products", "part_info").await,
        [bson!([info("P2", "strut"), info("P1", "grommet")]), bson!([info("P1", "grommet")])]
    );
    assert_eq!(
        example.field("products", "spares").await,
        [bson!([{"id": "P1", "count": 2, "name": "grommet"}]), bson!([])]
    );
    assert_eq!(
        example.field("parts", "product").await,
        [bson!("left-handed wrench"), bson!("smoke shifter"), bson!("(missing)")]
    );
    // A part renamed.
    example.set("parts", "P1", doc! {"name": "GROMMET"}).await;
    assert_eq!(
        example.field("products", "part_info").await,
        [bson!([info("P2", "strut"), info("P1", "GROMMET")]), bson!([info("P1", "GROMMET")])]
    );
    assert_eq!(example.field("products", "spares").await[0], bson!([{"id": "P1", "count": 2, "name": "GROMMET"}]));
    // A product no longer lists a part: the other product that does takes over. One lists a new part.
    example.set("products", 2, doc! {"parts": ["P3"]}).await;
    assert_eq!(
        example.field("parts", "product").await,
        [bson!("smoke shifter"), bson!("smoke shifter"), bson!("left-handed wrench")]
    );
    assert_eq!(example.field("parts", "catalog_number").await, [bson!(1234), bson!(1234), bson!(1000)]);
    // A part and a product are deleted.
    example.delete("parts", "P2").await;
    example.delete("products", 2).await;
    assert_eq!(example.field("products", "part_info").await, [bson!([info("P1", "GROMMET")])]);
    assert_eq!(example.field("parts", "product").await, [bson!("smoke shifter"), bson!("(missing)")]);
    example.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts() {
    let example = Example::start("hosts").await;
    let message =
        |id: i32, host: i32| doc! {"_id": id, "time": day(id.into()), "message": format!("m{id}"), "host": host};
    example
        .insert(
            "hosts",
            [
                doc! {"_id": 7, "name": "goofy", "ipaddr": "127.66.66.66"},
                doc! {"_id": 8, "name": "pluto", "ipaddr": "::1"},
            ],
        )
        .await;
    example.insert("logmsg", (0..1010).map(|id| message(id, 7))).await;
    let logged = async |host: usize| {
        let hosts = example.settled("hosts").await;
        let messages = hosts[host].get_array("logmsgs").unwrap();
        messages
            .iter()
            .map(|message| message.as_document().unwrap().get_str("message").unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let names = |range: std::ops::Range<i32>| range.map(|id| format!("m{id}")).collect::<Vec<_>>();
    assert_eq!(logged(0).await, names(10..1010));
    assert!(logged(1).await.is_empty());
    assert_eq!(all(&example.db, "logmsg").await[5].get_str("ipaddr").unwrap(), "127.66.66.66");
    // One of the thousand is deleted: the newest of the old ones comes back.
    example.delete("logmsg", 500).await;
    let mut expected = names(9..1010);
    expected.retain(|name| name != "m500");
    assert_eq!(logged(0).await, expected);
    // A message moves, the host's address changes, a new message is added.
    example.set("logmsg", 1009, doc! {"host": 8}).await;
    example.set("hosts", 7, doc! {"ipaddr": "10.0.0.7"}).await;
    example.insert("logmsg", [message(2000, 7)]).await;
    assert_eq!(logged(1).await, ["m1009"]);
    assert_eq!(logged(0).await.last().unwrap(), "m2000");
    assert_eq!(logged(0).await.len(), 1000);
    let wrong = doc! {"$nor": [{"host": 7, "ipaddr": "10.0.0.7", "hostname": "goofy"}, {"host": 8, "ipaddr": "::1", "hostname": "pluto"}]};
    assert_eq!(example.collection("logmsg").count_documents(wrong).await.unwrap(), 0);
    // The host is deleted, and with it the values copied from it. By then its messages are fewer than the removal limit
    // (1,000).
    example.collection("logmsg").delete_many(doc! {"_id": {"$lt": 100}}).await.unwrap();
    example.daemon.settled().await;
    example.delete("hosts", 7).await;
    example.daemon.settled().await;
    assert_eq!(example.collection("logmsg").count_documents(doc! {"ipaddr": {"$exists": true}}).await.unwrap(), 1);
    example.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages() {
    let example = Example::start("messages").await;
    example.insert("hosts", [doc! {"_id": "10.0.0.1", "name": "goofy", "site": "Oslo"}]).await;
    example
        .insert(
            "logmsg",
            [
                doc! {"_id": 1, "message": "cpu is on fire!", "ipaddr": "10.0.0.1"},
                doc! {"_id": 2, "ipaddr": "10.0.0.2"},
            ],
        )
        .await;
    let message = |id: i32, site: &str, then: &str| {
        doc! {"_id": id, "ipaddr": "10.0.0.1", "hostname": "goofy", "site": site, "site_then": then}
    };
    let found = async || {
        let mut found = example.settled("logmsg").await;
        for message in &mut found {
            message.remove("message");
        }
        crate::support::cases::shown(&found)
    };
    let shown = crate::support::cases::shown;
    assert_eq!(found().await, shown(&[message(1, "Oslo", "Oslo"), doc! {"_id": 2, "ipaddr": "10.0.0.2"}]));
    example.set("hosts", "10.0.0.1", doc! {"site": "Rome"}).await;
    example.daemon.settled().await;
    example.insert("logmsg", [doc! {"_id": 3, "ipaddr": "10.0.0.1"}]).await;
    example.daemon.settled().await;
    example.delete("hosts", "10.0.0.1").await;
    assert_eq!(
        found().await,
        shown(&[message(1, "Rome", "Oslo"), doc! {"_id": 2, "ipaddr": "10.0.0.2"}, message(3, "Rome", "Rome")])
    );
    // The source collection is dropped: the fields stay.
    example.collection("hosts").drop().await.unwrap();
    assert_eq!(
        found().await,
        shown(&[message(1, "Rome", "Oslo"), doc! {"_id": 2, "ipaddr": "10.0.0.2"}, message(3, "Rome", "Rome")])
    );
    example.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks() {
    let example = Example::start("tasks").await;
    let task = |id: i32, owner: i32| doc! {"_id": id, "description": format!("task {id}"), "due_date": day((100 - id).into()), "owner": owner};
    let next = |id: i32| bson!({"description": format!("task {id}"), "due_date": day((100 - id).into())});
    example.insert("person", [doc! {"_id": 1, "name": "Kate"}, doc! {"_id": 2, "name": "Jo"}]).await;
    example.insert("tasks", [task(10, 1), task(11, 1), task(12, 2)]).await;
    assert_eq!(example.field("person", "tasks").await, [bson!([11, 10]), bson!([12])]);
    assert_eq!(example.field("person", "next_task").await, [next(11), next(12)]);
    assert_eq!(example.field("tasks", "owner_name").await, [bson!("Kate"), bson!("Kate"), bson!("Jo")]);
    // Reassigned by one write: it moves between both people.
    example.set("tasks", 11, doc! {"owner": 2}).await;
    assert_eq!(example.field("person", "tasks").await, [bson!([10]), bson!([12, 11])]);
    assert_eq!(example.field("tasks", "owner_name").await, [bson!("Kate"), bson!("Jo"), bson!("Jo")]);
    // Due later: reordered. Renamed, deleted, and without an owner.
    example.set("tasks", 12, doc! {"due_date": day(500)}).await;
    example.set("person", 2, doc! {"name": "JO"}).await;
    example.delete("tasks", 10).await;
    assert_eq!(example.field("person", "tasks").await, [bson!([]), bson!([11, 12])]);
    assert_eq!(example.field("person", "next_task").await, [Bson::Null, next(11)]);
    example.set("tasks", 11, doc! {"owner": null}).await;
    assert_eq!(example.field("person", "tasks").await, [bson!([]), bson!([12])]);
    assert_eq!(example.field("tasks", "owner_name").await, [bson!("(missing)"), bson!("JO")]);
    // The other direction: the team's list is the source of truth.
    example.insert("players", [doc! {"_id": 4}, doc! {"_id": 5}, doc! {"_id": 6}]).await;
    example
        .insert(
            "teams",
            [
                doc! {"_id": "red", "name": "The Reds", "players": [4, 5]},
                doc! {"_id": "tan", "name": "The Tans", "players": [6]},
            ],
        )
        .await;
    assert_eq!(example.field("players", "team_name").await, [bson!("The Reds"), bson!("The Reds"), bson!("The Tans")]);
    example.set("teams", "red", doc! {"players": [4]}).await;
    example
        .collection("teams")
        .update_one(doc! {"_id": "tan"}, doc! {"$push": {"players": 5}, "$set": {"name": "Tan"}})
        .await
        .unwrap();
    assert_eq!(example.field("players", "team").await, [bson!("red"), bson!("tan"), bson!("tan")]);
    assert_eq!(example.field("players", "team_name").await, [bson!("The Reds"), bson!("Tan"), bson!("Tan")]);
    example.delete("teams", "tan").await;
    assert_eq!(example.field("players", "team").await, [bson!("red"), bson!("(missing)"), bson!("(missing)")]);
    example.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reviews() {
    let example = Example::start("reviews").await;
    example
        .insert("products", [doc! {"_id": 1, "name": "kettle"}, doc! {"_id": 2, "name": "pot", "rating": {"mine": 1}}])
        .await;
    let review = |id: i32, product: i32, status: &str| {
        doc! {"_id": id, "product_id": product, "review_author": format!("a{id}"), "review_text": "long", "rating": f64::from(id % 5), "published_date": day(id.into()), "status": status}
    };
    example.insert("reviews", (1..=12).map(|id| review(id, 1, "published"))).await;
    example.insert("reviews", [review(20, 1, "draft"), review(21, 2, "published")]).await;
    let newest = async |product: usize| {
        let products = example.settled("products").await;
        let reviews = products[product].get_array("reviews").unwrap();
        reviews.iter().map(|review| review.as_document().unwrap().get_i32("review_id").unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(newest(0).await, (3..=12).rev().collect::<Vec<_>>());
    let first = all(&example.db, "products").await[0].get_array("reviews").unwrap()[0].clone();
    assert_eq!(first, bson!({"review_id": 12, "review_author": "a12", "rating": 2.0, "published_date": day(12)}));
    assert_eq!(example.field("products", "review_count").await, [bson!(12), bson!(1)]);
    assert_eq!(
        example.field("products", "rating").await,
        [bson!({"avg": f64::from((1..=12).map(|id| id % 5).sum::<i32>()) / 12.0}), bson!({"mine": 1, "avg": 1.0})]
    );
    // Refilled from the eleventh.
    example.delete("reviews", 12).await;
    assert_eq!(newest(0).await, (2..=11).rev().collect::<Vec<_>>());
    // Published, unpublished, edited, older than the rest, moved.
    example.set("reviews", 20, doc! {"status": "published"}).await;
    example.set("reviews", 11, doc! {"status": "draft"}).await;
    example.set("reviews", 10, doc! {"review_author": "edited"}).await;
    example.set("reviews", 9, doc! {"published_date": day(0)}).await;
    example.set("reviews", 8, doc! {"product_id": 2}).await;
    assert_eq!(newest(0).await, [20, 10, 7, 6, 5, 4, 3, 2, 1, 9]);
    assert_eq!(newest(1).await, [21, 8]);
    let second = all(&example.db, "products").await[0].get_array("reviews").unwrap()[1].clone();
    assert_eq!(second.as_document().unwrap().get_str("review_author").unwrap(), "edited");
    assert_eq!(example.field("products", "review_count").await, [bson!(10), bson!(2)]);
    assert_eq!(example.field("products", "rating").await[1], bson!({"mine": 1, "avg": 2.0}));
    // A rating alone changes; then no review is left.
    example.set("reviews", 21, doc! {"rating": 5}).await;
    assert_eq!(example.field("products", "rating").await[1], bson!({"mine": 1, "avg": 4.0}));
    example.collection("reviews").delete_many(doc! {}).await.unwrap();
    assert!(newest(0).await.is_empty() && newest(1).await.is_empty());
    assert_eq!(example.field("products", "review_count").await, [bson!(0), bson!(0)]);
    assert_eq!(example.field("products", "rating").await, [bson!({"avg": null}), bson!({"mine": 1, "avg": null})]);
    example.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn comments() {
    let example = Example::start("comments").await;
    example.insert("posts", [doc! {"_id": 1, "title": "Rules of thumb"}, doc! {"_id": 2, "title": "Other"}]).await;
    let comment =
        |id: i32, votes: i32| doc! {"_id": id, "post": 1, "author": format!("a{id}"), "text": "t", "votes": votes};
    example
        .insert(
            "comments",
            [comment(1, 3), comment(2, 9), comment(3, 3), comment(4, 0), comment(5, 3), comment(6, 3), comment(7, 1)],
        )
        .await;
    let top = async |post: usize| {
        let posts = example.settled("posts").await;
        let top = posts[post].get_array("top_comments").unwrap();
        top.iter().map(|comment| comment.as_document().unwrap().get_i32("id").unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(top(0).await, [2, 1, 3, 5, 6], "equal votes are in the order of _id");
    assert_eq!(example.field("posts", "comment_count").await, [bson!(7), bson!(0)]);
    assert_eq!(example.field("comments", "post_title").await, vec![bson!("Rules of thumb"); 7]);
    // Votes reorder; a hidden and a deleted one are refilled.
    example.collection("comments").update_one(doc! {"_id": 7}, doc! {"$inc": {"votes": 100}}).await.unwrap();
    assert_eq!(top(0).await, [7, 2, 1, 3, 5]);
    example.set("comments", 2, doc! {"hidden": true}).await;
    example.delete("comments", 1).await;
    assert_eq!(top(0).await, [7, 3, 5, 6, 4]);
    assert_eq!(example.field("posts", "comment_count").await, [bson!(5), bson!(0)]);
    // Moved to another post, whose title then changes.
    example.set("comments", 7, doc! {"post": 2}).await;
    example.set("posts", 2, doc! {"title": "New"}).await;
    assert_eq!((top(0).await, top(1).await), (vec![3, 5, 6, 4], vec![7]));
    assert_eq!(example.field("comments", "post_title").await.last().unwrap(), &bson!("New"));
    example.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn films() {
    let example = Example::start("films").await;
    example
        .insert(
            "films",
            [
                doc! {"_id": 1, "title": "The Third Man", "viewers": 10},
                doc! {"_id": 2, "title": "Citizen Kane", "viewers": 90},
            ],
        )
        .await;
    example
        .insert(
            "actors",
            [
                doc! {"_id": 7, "name": "Orson Welles"},
                doc! {"_id": 8, "name": "Joseph Cotten"},
                doc! {"_id": 9, "name": "Alida Valli"},
                doc! {"_id": 10, "name": "Ernst Deutsch"},
            ],
        )
        .await;
    let role = |id: i32, film: i32, actor: i32, character: &str, minutes: i32| {
        doc! {"_id": id, "film": film, "actor": actor, "character": character, "minutes": minutes}
    };
    example
        .insert(
            "roles",
            [
                role(1, 1, 7, "Harry Lime", 5),
                role(2, 1, 8, "Holly Martins", 80),
                role(3, 1, 9, "Anna Schmidt", 40),
                role(4, 1, 10, "Baron Kurtz", 4),
                role(5, 2, 7, "Kane", 99),
            ],
        )
        .await;
    let member =
        |actor: i32, name: &str, character: &str| bson!({"actor": actor, "name": name, "character": character});
    let (cotten, valli, lime) = (
        member(8, "Joseph Cotten", "Holly Martins"),
        member(9, "Alida Valli", "Anna Schmidt"),
        member(7, "Orson Welles", "Harry Lime"),
    );
    assert_eq!(
        example.field("films", "cast").await,
        [bson!([cotten.clone(), valli.clone(), lime]), bson!([member(7, "Orson Welles", "Kane")])]
    );
    let known = |title: &str, character: &str| bson!({"title": title, "character": character});
    let missing = || bson!("(missing)");
    assert_eq!(
        example.field("actors", "best_known_for").await,
        [
            known("Citizen Kane", "Kane"),
            known("The Third Man", "Holly Martins"),
            known("The Third Man", "Anna Schmidt"),
            missing()
        ]
    );
    // A larger role pushes one out; a renamed actor reaches the film through the role.
    example.set("roles", 4, doc! {"minutes": 50}).await;
    example.set("actors", 7, doc! {"name": "O. Welles"}).await;
    example.delete("roles", 3).await;
    let kurtz = member(10, "Ernst Deutsch", "Baron Kurtz");
    assert_eq!(
        example.field("films", "cast").await,
        [bson!([cotten, kurtz, member(7, "O. Welles", "Harry Lime")]), bson!([member(7, "O. Welles", "Kane")])]
    );
    assert_eq!(
        example.field("actors", "best_known_for").await,
        [
            known("Citizen Kane", "Kane"),
            known("The Third Man", "Holly Martins"),
            missing(),
            known("The Third Man", "Baron Kurtz")
        ]
    );
    // The order of films changes; a film is deleted.
    example.set("films", 1, doc! {"viewers": 1000}).await;
    assert_eq!(example.field("actors", "best_known_for").await[0], known("The Third Man", "Harry Lime"));
    example.delete("films", 1).await;
    assert_eq!(
        example.field("actors", "best_known_for").await,
        [known("Citizen Kane", "Kane"), missing(), missing(), missing()]
    );
    example.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn books() {
    let example = Example::start("books").await;
    let publisher = |id: i32, acronym: &str, name: &str| doc! {"_id": id, "acronym": acronym, "name": name, "foundationYear": 1978, "HQ": "California"};
    example.insert("publisher", [publisher(1, "OREILLY", "O'Reilly Media"), publisher(2, "MANNING", "Manning")]).await;
    example
        .insert("book", [
            doc! {"_id": 1, "title": "By DBRef", "publisher": {"$ref": "publisher", "$id": 1}},
            doc! {"_id": 2, "title": "By id", "publisher_id": 1},
            doc! {"_id": 3, "title": "By acronym", "publisher_acronym": "OREILLY"},
            doc! {"_id": 4, "title": "Another collection's", "publisher": {"$ref": "press", "$id": 1}},
            doc! {"_id": 5, "title": "A DBRef too", "publisher": {"$ref": "publisher", "$id": 1, "$db": example.db.name()}},
        ])
        .await;
    example
        .insert(
            "shelf",
            [doc! {"_id": "fiction", "books": [{"title": "x", "publisher_id": 1}, {"title": "y", "publisher_id": 2}]}],
        )
        .await;
    let missing = || bson!("(missing)");
    let info = |name: &str, acronym: &str| bson!({"name": name, "acronym": acronym, "foundationYear": 1978});
    let oreilly = || info("O'Reilly Media", "OREILLY");
    assert_eq!(example.field("book", "publisher_info").await, [oreilly(), missing(), missing(), missing(), oreilly()]);
    let whole = |id: i32, name: &str, acronym: &str| bson!({"_id": id, "name": name, "acronym": acronym, "foundationYear": 1978, "HQ": "California"});
    assert_eq!(example.field("book", "published_by").await[1], whole(1, "O'Reilly Media", "OREILLY"));
    assert_eq!(
        example.field("book", "publisher_name").await,
        [missing(), missing(), bson!("O'Reilly Media"), missing(), missing()]
    );
    let title = |id: i32, title: &str| bson!({"id": id, "title": title});
    assert_eq!(
        example.field("publisher", "books").await,
        [bson!([title(5, "A DBRef too"), title(1, "By DBRef")]), bson!([])]
    );
    let shelf = |first: &str, second: &str| {
        [
            bson!([{"title": "x", "publisher_id": 1, "publisher": first}, {"title": "y", "publisher_id": 2, "publisher": second}]),
        ]
    };
    assert_eq!(example.field("shelf", "books").await, shelf("O'Reilly Media", "Manning"));
    // Renamed, and with another acronym.
    example.set("publisher", 1, doc! {"name": "O'R", "acronym": "OR"}).await;
    example.set("publisher", 2, doc! {"acronym": "OREILLY"}).await;
    assert_eq!(example.field("book", "publisher_info").await[0], info("O'R", "OR"));
    assert_eq!(example.field("book", "published_by").await[1], whole(1, "O'R", "OR"));
    assert_eq!(example.field("book", "publisher_name").await[2], bson!("Manning"));
    assert_eq!(example.field("shelf", "books").await, shelf("O'R", "Manning"));
    // Re-pointed, to another publisher and to another collection; retitled; deleted.
    example.set("book", 1, doc! {"publisher": {"$ref": "publisher", "$id": 2}, "title": "Moved"}).await;
    example.set("book", 5, doc! {"publisher.$ref": "press"}).await;
    example.delete("publisher", 1).await;
    assert_eq!(
        example.field("book", "publisher_info").await,
        [info("Manning", "OREILLY"), missing(), missing(), missing(), missing()]
    );
    assert_eq!(example.field("book", "published_by").await[1], missing());
    assert_eq!(example.field("publisher", "books").await, [bson!([title(1, "Moved")])]);
    assert_eq!(
        example.field("shelf", "books").await,
        [bson!([{"title": "x", "publisher_id": 1}, {"title": "y", "publisher_id": 2, "publisher": "Manning"}])]
    );
    example.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn patrons() {
    let example = Example::start("patrons").await;
    let address = |id: i32, patron: &str, main: bool| doc! {"_id": id, "patron_id": patron, "street": format!("{id} Street"), "city": "Faketon", "state": "MA", "zip": "12345", "main": main};
    let embedded = |id: i32| doc! {"street": format!("{id} Street"), "city": "Faketon", "state": "MA", "zip": "12345"};
    let listed = |id: i32| {
        let mut whole = doc! {"_id": id};
        whole.extend(embedded(id));
        Bson::from(whole)
    };
    example.insert("patron", [doc! {"_id": "ann", "name": "Ann"}, doc! {"_id": "joe", "name": "Joe Bookreader"}]).await;
    example.insert("address", [address(1, "joe", true), address(2, "joe", false), address(3, "joe", true)]).await;
    let missing = || bson!("(missing)");
    assert_eq!(example.field("patron", "address").await, [missing(), embedded(1).into()]);
    assert_eq!(example.field("patron", "addresses").await, [missing(), bson!([listed(1), listed(2), listed(3)])]);
    assert_eq!(example.field("address", "patron").await, vec![bson!({"name": "Joe Bookreader"}); 3]);
    // Moved to Ann; another address is the main one; the patron is renamed.
    example.set("address", 1, doc! {"patron_id": "ann"}).await;
    example.set("patron", "ann", doc! {"name": "Anna"}).await;
    assert_eq!(example.field("patron", "address").await, [Bson::from(embedded(1)), embedded(3).into()]);
    assert_eq!(example.field("patron", "addresses").await, [bson!([listed(1)]), bson!([listed(2), listed(3)])]);
    assert_eq!(example.field("address", "patron").await[0], bson!({"name": "Anna"}));
    example.set("address", 3, doc! {"main": false}).await;
    example.delete("address", 1).await;
    assert_eq!(example.field("patron", "address").await, [missing(), missing()]);
    assert_eq!(example.field("patron", "addresses").await, [missing(), bson!([listed(2), listed(3)])]);
    example.stop().await;
}

/// The examples that are tested here, by the tests' names, and those that are tested elsewhere on their own data.
const HERE: &[&str] =
    &["addresses", "books", "comments", "films", "hosts", "messages", "parts", "patrons", "reviews", "tasks"];
const ELSEWHERE: &[&str] = &["flights", "shop"];

#[test]
fn every_example_has_a_test_says_what_it_is_and_passes_plan() {
    let text = include_str!("patterns.rs");
    let mut seen = BTreeSet::new();
    for entry in std::fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        // The schema for editors is in the same folder.
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        assert!(HERE.contains(&&*name) || ELSEWHERE.contains(&&*name), "{} has no test: add one here", path.display());
        let plan = Command::new(env!("CARGO_BIN_EXE_denormd"))
            .env_clear()
            .args(["plan", "--offline", "--config"])
            .arg(&path)
            .output()
            .unwrap();
        assert!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
        if HERE.contains(&&*name) {
            assert!(text.contains(&format!("Example::start(\"{name}\")")), "{name} has no test");
            let example = std::fs::read_to_string(&path).unwrap();
            assert!(example.starts_with("# "), "{name} does not say what it is");
            assert!(example.contains("uri: mongodb://localhost:27017/?replicaSet=rs0"), "{name}");
        }
        seen.insert(name);
    }
    let gone: Vec<_> = HERE.iter().filter(|name| !seen.contains(**name)).collect();
    assert!(gone.is_empty(), "no file for {gone:?}");
}
