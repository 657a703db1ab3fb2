//! The workloads: documents, rules, changes, and the writes that follow from them. Pure.

mod unread;

use bson::{Bson, DateTime, Document, doc};

/// Changes, and the target writes that they lead to.
pub struct Workload {
    /// One word.
    pub name: &'static str,
    /// In words.
    pub what: &'static str,
    /// As in a config file.
    pub rules: &'static str,
    /// Source writes in one round; in `tree` the documents that move with one.
    pub changes: usize,
    /// The documents before the first round.
    pub load: fn() -> Vec<(&'static str, Vec<Document>)>,
    /// The index that docs/performance.md advises for the rule: its collection and paths.
    pub index: Option<(&'static str, [&'static str; 2])>,
    /// One round's source writes.
    pub change: fn(i32) -> Vec<Change>,
    /// The target writes that make that round true, the strictest floor first.
    pub floors: fn(i32) -> Vec<Floor>,
    /// Finds the targets that are not what they must be after that round.
    pub stale: fn(i32) -> (&'static str, Document),
}

/// Source writes.
pub enum Change {
    /// New documents.
    Insert(&'static str, Vec<Document>),
    /// Update statements.
    Update(&'static str, Vec<Document>),
}

/// Target writes by somebody who knows them.
pub struct Floor {
    /// In a few words.
    pub name: &'static str,
    /// The collection.
    pub collection: &'static str,
    /// Update statements.
    pub statements: Vec<Document>,
}

impl Floor {
    fn new(name: &'static str, collection: &'static str, statements: Vec<Document>) -> Vec<Self> {
        vec![Self { name, collection, statements }]
    }

    fn and(name: &'static str, statements: Vec<Document>, mut floors: Vec<Self>) -> Vec<Self> {
        let collection = floors[0].collection;
        floors.push(Self { name, collection, statements });
        floors
    }
}

const SOURCES: i32 = 20_000;
const FAN_OUT: i32 = 4;
const ELEMENTS: i32 = 5;
const HOSTS: i32 = 1_000;
const MESSAGES: i32 = 100_000;
const MILLION: i32 = 1_000_000;
const PRODUCTS: i32 = 5_000;
const REVIEWS: i32 = 100_000;
const LOGGING: i32 = 100;
const LOGGED: i32 = 20_000;
const CHILDREN: i32 = 20_000;
const NODES: i32 = 10_000;
const BRANCHES: i32 = 10;
const ITEMS: i32 = 100;
const DAYS: i32 = 50;
const DAY: i64 = 86_400_000;

fn size(number: i32) -> usize {
    usize::try_from(number).unwrap_or_default()
}

/// All of them.
pub fn all() -> Vec<Workload> {
    vec![rename(), arrays(), insert(), million(), latest(), log(), hot(), counts(), unread::unread(), tree(), buckets()]
}

fn name(version: i32) -> String {
    format!("part {version}")
}

fn renames(version: i32) -> Vec<Document> {
    (0..SOURCES).map(|id| doc! {"q": {"_id": id}, "u": {"$set": {"name": name(version), "price": version}}}).collect()
}

fn parts() -> Vec<Document> {
    (0..SOURCES).map(|id| doc! {"_id": id, "name": name(0), "price": 0}).collect()
}

fn rename() -> Workload {
    Workload {
        name: "rename",
        what: "20,000 sources of 4 targets each, a scalar reference, two fields copied",
        rules: "  - name: names\n    copy: { source: parts, target: products, match: { part: _id }, set: { name: $name, price: $price } }\n",
        changes: size(SOURCES),
        load: || {
            let product = |id| doc! {"_id": id, "part": id % SOURCES, "stock": id % 7};
            vec![("parts", parts()), ("products", (0..SOURCES * FAN_OUT).map(product).collect())]
        },
        index: None,
        change: |version| vec![Change::Update("parts", renames(version))],
        floors: |version| {
            let known =
                |id| doc! {"q": {"part": id}, "u": {"$set": {"name": name(version), "price": version}}, "multi": true};
            Floor::new("known", "products", (0..SOURCES).map(known).collect())
        },
        stale: |version| ("products", doc! {"$nor": [{"name": name(version), "price": version}]}),
    }
}

fn arrays() -> Workload {
    Workload {
        name: "arrays",
        what: "20,000 sources, each in 4 targets of 5 elements",
        rules: "  - name: names\n    copy: { source: parts, target: products, match: { \"parts.$[].id\": _id }, set: { \"parts.$[].name\": $name } }\n",
        changes: size(SOURCES),
        load: || {
            // Targets have five references, a source is in four targets.
            let product = |id: i32| {
                let parts: Vec<Document> =
                    (0..ELEMENTS).map(|nth| doc! {"id": (id * ELEMENTS + nth) % SOURCES, "n": 1}).collect();
                doc! {"_id": id, "parts": parts}
            };
            vec![("parts", parts()), ("products", (0..SOURCES * FAN_OUT / ELEMENTS).map(product).collect())]
        },
        index: None,
        change: |version| vec![Change::Update("parts", renames(version))],
        floors: |version| {
            let known = |id| {
                doc! {
                    "q": {"parts.id": id}, "u": {"$set": {"parts.$[e].name": name(version)}}, "multi": true,
                    "arrayFilters": [{"e.id": id}],
                }
            };
            Floor::new("known", "products", (0..SOURCES).map(known).collect())
        },
        stale: |version| ("products", doc! {"parts": {"$elemMatch": {"name": {"$ne": name(version)}}}}),
    }
}

fn insert() -> Workload {
    Workload {
        name: "insert",
        what: "100,000 new messages of 1,000 hosts need the host's address",
        rules: "  - name: address\n    copy: { source: hosts, target: logmsg, match: { host: _id }, set: { ipaddr: $ipaddr, hostname: $name } }\n",
        changes: size(MESSAGES),
        load: || {
            let host = |id| doc! {"_id": id, "name": format!("host{id}"), "ipaddr": format!("10.0.0.{id}")};
            vec![("hosts", (0..HOSTS).map(host).collect())]
        },
        index: None,
        change: |version| {
            let message =
                |nth: i32| doc! {"_id": version * MESSAGES + nth, "host": nth % HOSTS, "message": "something happened"};
            vec![Change::Insert("logmsg", (0..MESSAGES).map(message).collect())]
        },
        floors: |version| {
            let known = |host: i32| {
                let ids: Vec<i32> = (0..MESSAGES / HOSTS).map(|nth| version * MESSAGES + nth * HOSTS + host).collect();
                doc! {
                    "q": {"_id": {"$in": ids}}, "u": {"$set": {"hostname": format!("host{host}"), "ipaddr": format!("10.0.0.{host}")}},
                    "multi": true,
                }
            };
            let each = |nth: i32| {
                let host = nth % HOSTS;
                doc! {"q": {"_id": version * MESSAGES + nth}, "u": {"$set": {"hostname": format!("host{host}"), "ipaddr": format!("10.0.0.{host}")}}}
            };
            Floor::and(
                "one by one",
                (0..MESSAGES).map(each).collect(),
                Floor::new("known", "logmsg", (0..HOSTS).map(known).collect()),
            )
        },
        stale: |_| ("logmsg", doc! {"ipaddr": null}),
    }
}

fn million() -> Workload {
    Workload {
        name: "million",
        what: "one source of 1,000,000 targets, against one updateMany",
        rules: "  - name: address\n    copy: { source: hosts, target: logmsg, match: { host: _id }, set: { ipaddr: $ipaddr } }\n",
        changes: size(MILLION),
        load: || {
            let message = |id| doc! {"_id": id, "host": 1, "message": "something happened"};
            vec![("hosts", vec![doc! {"_id": 1, "ipaddr": "0"}]), ("logmsg", (0..MILLION).map(message).collect())]
        },
        index: None,
        change: |version| {
            vec![Change::Update("hosts", vec![doc! {"q": {"_id": 1}, "u": {"$set": {"ipaddr": version.to_string()}}}])]
        },
        floors: |version| {
            let all = doc! {"q": {"host": 1}, "u": {"$set": {"ipaddr": version.to_string()}}, "multi": true};
            Floor::new("updateMany", "logmsg", vec![all])
        },
        stale: |version| ("logmsg", doc! {"ipaddr": {"$ne": version.to_string()}}),
    }
}

fn review(version: i32, nth: i32) -> Document {
    doc! {"_id": version * REVIEWS + nth, "product": nth % PRODUCTS, "author": format!("author {nth}"), "date": version * REVIEWS + nth, "text": "good"}
}

fn shown(version: i32, nth: i32) -> Document {
    doc! {"id": version * REVIEWS + nth, "author": format!("author {nth}"), "date": version * REVIEWS + nth}
}

/// The numbers of a product's reviews of one round, newest first.
fn of_product(product: i32) -> impl Iterator<Item = i32> {
    (0..REVIEWS / PRODUCTS).rev().map(move |nth| nth * PRODUCTS + product)
}

fn latest() -> Workload {
    Workload {
        name: "latest",
        what: "the latest ten reviews of 5,000 products, 100,000 new ones",
        rules: "  - name: latest\n    collect: { source: reviews, target: products, match: { _id: product }, into: reviews, element: { id: $_id, author: $author, date: $date }, sort: { date: -1 }, slice: 10 }\n",
        changes: size(REVIEWS),
        load: || {
            vec![
                ("products", (0..PRODUCTS).map(|id| doc! {"_id": id, "name": "a product"}).collect()),
                ("reviews", (0..REVIEWS).map(|nth| review(0, nth)).collect()),
            ]
        },
        index: None,
        change: |version| vec![Change::Insert("reviews", (0..REVIEWS).map(|nth| review(version, nth)).collect())],
        floors: |version| {
            let known = |product| {
                let ten: Vec<Document> = of_product(product).take(10).map(|nth| shown(version, nth)).collect();
                doc! {"q": {"_id": product}, "u": {"$set": {"reviews": ten}}}
            };
            let push = |nth: i32| {
                let push = doc! {"$each": [shown(version, nth)], "$sort": {"date": -1}, "$slice": 10};
                doc! {"q": {"_id": nth % PRODUCTS}, "u": {"$push": {"reviews": push}}}
            };
            Floor::and(
                "blind $push",
                (0..REVIEWS).map(push).collect(),
                Floor::new("known", "products", (0..PRODUCTS).map(known).collect()),
            )
        },
        stale: |version| {
            // The newest and the tenth.
            let newest = doc! {"reviews.0.date": {"$gte": version * REVIEWS}, "reviews.9.date": {"$gte": version * REVIEWS}, "reviews.10": {"$exists": false}};
            ("products", doc! {"$nor": [newest]})
        },
    }
}

fn logged(version: i32, nth: i32) -> Document {
    doc! {"_id": version * LOGGED + nth, "host": nth % LOGGING, "time": version * LOGGED + nth, "message": format!("message {nth}")}
}

/// The lines of a host in one round, oldest first.
fn lines(version: i32, host: i32) -> Vec<Bson> {
    let numbers = (0..LOGGED / LOGGING).map(|nth| nth * LOGGING + host);
    numbers.map(|nth| doc! {"time": version * LOGGED + nth, "message": format!("message {nth}")}.into()).collect()
}

fn log() -> Workload {
    Workload {
        name: "log",
        what: "the last 1,000 messages of 100 hosts, 20,000 new ones",
        rules: "  - name: log\n    collect: { source: logmsg, target: hosts, match: { _id: host }, into: logmsgs, element: { time: $time, message: $message }, sort: { time: 1 }, slice: -1000 }\n",
        changes: size(LOGGED),
        load: || {
            let messages = |version: i32| (0..LOGGED).map(move |nth| logged(version, nth));
            vec![
                ("hosts", (0..LOGGING).map(|id| doc! {"_id": id}).collect()),
                ("logmsg", (-5..=1).flat_map(messages).collect()),
            ]
        },
        index: None,
        change: |version| vec![Change::Insert("logmsg", (0..LOGGED).map(|nth| logged(version, nth)).collect())],
        floors: |version| {
            let known = |host: i32| {
                let last: Vec<Bson> = (version - 4..=version).flat_map(|version| lines(version, host)).collect();
                doc! {"q": {"_id": host}, "u": {"$set": {"logmsgs": last}}}
            };
            let push = |host: i32| {
                let push = doc! {"$each": lines(version, host), "$slice": -1000};
                doc! {"q": {"_id": host}, "u": {"$push": {"logmsgs": push}}}
            };
            let blind = |nth: i32| {
                let line = doc! {"time": version * LOGGED + nth, "message": format!("message {nth}")};
                let push = doc! {"$each": [line], "$slice": -1000};
                doc! {"q": {"_id": nth % LOGGING}, "u": {"$push": {"logmsgs": push}}}
            };
            let known = Floor::new("known", "hosts", (0..LOGGING).map(known).collect());
            let grouped = Floor::and("one $push a host", (0..LOGGING).map(push).collect(), known);
            Floor::and("blind $push", (0..LOGGED).map(blind).collect(), grouped)
        },
        stale: |version| {
            let first = (version - 4) * LOGGED;
            let true_ones = doc! {"logmsgs.0.time": {"$gte": first}, "logmsgs.999.time": {"$gte": version * LOGGED}};
            ("hosts", doc! {"$nor": [true_ones]})
        },
    }
}

fn hot() -> Workload {
    Workload {
        name: "hot",
        what: "20,000 new children of one parent, counted",
        rules: "  - name: stats\n    aggregate: { source: children, target: parents, match: { _id: parent }, set: { count: { $sum: 1 }, total: { $sum: $n } } }\n",
        changes: size(CHILDREN),
        load: || vec![("parents", vec![doc! {"_id": 1}]), ("children", vec![doc! {"_id": -1, "parent": 1, "n": 0}])],
        index: Some(("children", ["parent", "n"])),
        change: |version| {
            let child = |nth: i32| doc! {"_id": version * CHILDREN + nth, "parent": 1, "n": 1};
            vec![Change::Insert("children", (0..CHILDREN).map(child).collect())]
        },
        floors: |_| {
            let one = doc! {"q": {"_id": 1}, "u": {"$inc": {"count": 1, "total": 1}}};
            Floor::new("blind $inc", "parents", vec![one; size(CHILDREN)])
        },
        stale: |version| ("parents", doc! {"total": {"$ne": (version - 1) * CHILDREN}}),
    }
}

fn counts() -> Workload {
    Workload {
        name: "counts",
        what: "counts and means of 100,000 reviews of 5,000 products, each with a new rating",
        rules: "  - name: stats\n    aggregate: { source: reviews, target: products, match: { _id: product }, set: { review_count: { $sum: 1 }, \"rating.avg\": { $avg: $rating } } }\n",
        changes: size(REVIEWS),
        load: || {
            let review = |nth: i32| doc! {"_id": nth, "product": nth % PRODUCTS, "rating": 0, "text": "good"};
            vec![
                ("products", (0..PRODUCTS).map(|id| doc! {"_id": id, "name": "a product"}).collect()),
                ("reviews", (0..REVIEWS).map(review).collect()),
            ]
        },
        index: Some(("reviews", ["product", "rating"])),
        change: |version| {
            let rate = |nth: i32| doc! {"q": {"_id": nth}, "u": {"$set": {"rating": version}}};
            vec![Change::Update("reviews", (0..REVIEWS).map(rate).collect())]
        },
        floors: |version| {
            let known = |product| {
                doc! {"q": {"_id": product}, "u": {"$set": {"review_count": REVIEWS / PRODUCTS, "rating.avg": f64::from(version)}}}
            };
            let inc = |nth: i32| doc! {"q": {"_id": nth % PRODUCTS}, "u": {"$inc": {"sum": 1, "changes": 1}}};
            Floor::and(
                "blind $inc",
                (0..REVIEWS).map(inc).collect(),
                Floor::new("known", "products", (0..PRODUCTS).map(known).collect()),
            )
        },
        stale: |version| {
            ("products", doc! {"$nor": [{"review_count": REVIEWS / PRODUCTS, "rating.avg": f64::from(version)}]})
        },
    }
}

/// The path of a document in a subtree whose root is `n0`, below the root of this round.
fn path(version: i32, node: i32) -> String {
    let above = if node == 0 { format!("r{}", version % 2) } else { path(version, (node - 1) / BRANCHES) };
    format!("{above}/n{node}")
}

fn tree() -> Workload {
    Workload {
        name: "tree",
        what: "a subtree of 10,000 documents on five levels moves, each with its path",
        rules: "  - name: paths\n    copy: { source: categories, target: categories, match: { parent: _id }, recursive: true, set: { path: { $concat: [$path, /, $$target.name] } }, otherwise: { path: $$target.name } }\n",
        changes: size(NODES),
        load: || {
            let root = |nth: i32| doc! {"_id": -nth - 1, "name": format!("r{nth}")};
            let node = |nth: i32| {
                let parent = if nth == 0 { -1 } else { (nth - 1) / BRANCHES };
                doc! {"_id": nth, "parent": parent, "name": format!("n{nth}")}
            };
            vec![("categories", (0..2).map(root).chain((0..NODES).map(node)).collect())]
        },
        index: None,
        change: |version| {
            let moved = doc! {"q": {"_id": 0}, "u": {"$set": {"parent": -(version % 2) - 1}}};
            vec![Change::Update("categories", vec![moved])]
        },
        floors: |version| {
            let known = |node| doc! {"q": {"_id": node}, "u": {"$set": {"path": path(version, node)}}};
            Floor::new("known", "categories", (0..NODES).map(known).collect())
        },
        stale: |version| {
            let right = format!("^r{}/", version % 2);
            ("categories", doc! {"_id": {"$gte": 0}, "path": {"$not": {"$regex": right}}})
        },
    }
}

/// The `_id` of the document of an item and a day.
fn bucket(nth: i32) -> Document {
    let day = DateTime::from_millis(DAY * i64::from(nth / ITEMS % DAYS));
    doc! {"item": nth % ITEMS, "day": day}
}

fn buckets() -> Workload {
    Workload {
        name: "buckets",
        what: "totals of 100,000 sales in 5,000 documents that denormd creates, one for each item and day",
        rules: "  - name: daily\n    aggregate: { source: sales, target: { collection: daily, create: true }, match: { _id.item: item, _id.day: { $dateTrunc: { date: $at, unit: day } } }, set: { n: { $sum: 1 }, amount: { $sum: $amount } } }\n",
        changes: size(REVIEWS),
        load: || {
            let sale = |nth: i32| {
                let at = DateTime::from_millis(DAY * i64::from(nth / ITEMS % DAYS) + i64::from(nth) * 100);
                doc! {"_id": nth, "item": nth % ITEMS, "at": at, "amount": 0}
            };
            vec![("sales", (0..REVIEWS).map(sale).collect())]
        },
        index: None,
        change: |version| {
            let price = |nth: i32| doc! {"q": {"_id": nth}, "u": {"$set": {"amount": version}}};
            vec![Change::Update("sales", (0..REVIEWS).map(price).collect())]
        },
        floors: |version| {
            let (sales, all) = (REVIEWS / (ITEMS * DAYS), ITEMS * DAYS);
            let known = |nth: i32| {
                let set = doc! {"n": sales, "amount": sales * version};
                doc! {"q": {"_id": bucket(nth)}, "u": {"$set": set}, "upsert": true}
            };
            let inc =
                |nth: i32| doc! {"q": {"_id": bucket(nth)}, "u": {"$inc": {"sum": 1, "changes": 1}}, "upsert": true};
            Floor::and(
                "blind $inc",
                (0..REVIEWS).map(inc).collect(),
                Floor::new("known", "daily", (0..all).map(known).collect()),
            )
        },
        stale: |version| {
            let sales = REVIEWS / (ITEMS * DAYS);
            ("daily", doc! {"$nor": [{"n": sales, "amount": sales * version}]})
        },
    }
}
