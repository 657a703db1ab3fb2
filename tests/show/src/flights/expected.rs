//! The expected content of each document, computed a second time from the sources alone: `config/flights.yaml` in plain
//! Rust.

use std::collections::HashMap;

use bson::{Bson, Document, doc};
use futures_util::TryStreamExt;
use mongodb::{
    Client, Database,
    options::{ReadConcern, ReadPreference, SelectionCriteria},
};

use super::{DATABASE, gathered::Gathered};

/// A rule of `config/flights.yaml`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// `airline`
    Airline,
    /// `origin-airport`
    Origin,
    /// `dest-airport`
    Dest,
    /// `plane`
    Plane,
    /// `plane-last-flights`
    LastFlights,
    /// `plane-flights`
    PlaneFlights,
    /// `departures`
    Departures,
    /// `arrivals`
    Arrivals,
}

impl Rule {
    /// All rules.
    pub const ALL: [Self; 8] = [
        Self::Airline,
        Self::Origin,
        Self::Dest,
        Self::Plane,
        Self::LastFlights,
        Self::PlaneFlights,
        Self::Departures,
        Self::Arrivals,
    ];

    /// The collection that it writes to.
    pub fn target(self) -> &'static str {
        match self {
            Self::Airline | Self::Origin | Self::Dest | Self::Plane => "flights",
            Self::LastFlights | Self::PlaneFlights => "planes",
            Self::Departures | Self::Arrivals => "airports",
        }
    }

    /// The field of the target in its `match`.
    pub fn reference(self) -> &'static str {
        match self {
            Self::Airline => "carrier",
            Self::Origin => "origin",
            Self::Dest => "dest",
            Self::Plane | Self::LastFlights | Self::PlaneFlights => "tailnum",
            Self::Departures | Self::Arrivals => "faa",
        }
    }

    /// The rules that write to a collection.
    pub fn into(target: &str) -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(move |rule| rule.target() == target)
    }
}

/// The copied paths, and the value of each; `None` where there must be none.
pub type Values = Vec<(&'static str, Option<Bson>)>;

/// The values that a rule copies into a flight from a source document.
fn copied(rule: Rule, source: Option<&Document>) -> Values {
    let field = |name: &str| source.and_then(|source| source.get(name)).cloned();
    match rule {
        Rule::Airline => vec![("airline_name", field("name"))],
        Rule::Origin => vec![("origin_airport.name", field("name")), ("origin_airport.tzone", field("tzone"))],
        Rule::Dest => vec![(
            "dest_airport",
            source.map(|source| Bson::Document(part(source, &["name", "lat", "lon", "alt", "tzone"]))),
        )],
        Rule::Plane => {
            vec![("plane.year", field("year")), ("plane.model", source.map(model)), ("plane.seats", field("seats"))]
        }
        Rule::LastFlights | Rule::PlaneFlights | Rule::Departures | Rule::Arrivals => Vec::new(),
    }
}

/// The existing fields among these, in this order.
fn part(source: &Document, names: &[&str]) -> Document {
    names.iter().filter_map(|name| Some(((*name).to_owned(), source.get(*name)?.clone()))).collect()
}

/// Like `$concat`, null if a part is missing.
fn model(plane: &Document) -> Bson {
    match (plane.get_str("manufacturer"), plane.get_str("model")) {
        (Ok(manufacturer), Ok(model)) => Bson::String(format!("{manufacturer} {model}")),
        _ => Bson::Null,
    }
}

/// The current sources on the server, by key, and the values gathered from the flights so far.
pub struct Sources {
    airlines: HashMap<String, Document>,
    airports: HashMap<String, Document>,
    planes: HashMap<String, Document>,
    gathered: Gathered,
}

impl Sources {
    /// Reads the sources.
    pub async fn read(client: &Client) -> Self {
        let database = client.database(DATABASE);
        Self {
            airlines: by_key(&database, "airlines", "carrier").await,
            airports: by_key(&database, "airports", "faa").await,
            planes: by_key(&database, "planes", "tailnum").await,
            gathered: Gathered::default(),
        }
    }

    /// The copied paths of a rule in a document of its target, with their values. For planes and airports only valid
    /// after every flight was added.
    pub fn expected(&self, rule: Rule, target: &Document) -> Values {
        let key = target.get_str(rule.reference()).ok();
        let sources = match rule {
            Rule::Airline => &self.airlines,
            Rule::Origin | Rule::Dest => &self.airports,
            Rule::Plane => &self.planes,
            Rule::LastFlights | Rule::PlaneFlights | Rule::Departures | Rule::Arrivals => {
                return self.gathered.expected(rule, key);
            }
        };
        copied(rule, key.and_then(|key| sources.get(key)))
    }
}

/// Documents by key; if several share one, the first by `_id`.
async fn by_key(database: &Database, collection: &str, key: &str) -> HashMap<String, Document> {
    let mut found = HashMap::new();
    let mut cursor = database
        .collection::<Document>(collection)
        .find(doc! {})
        .sort(doc! {"_id": 1})
        .read_concern(ReadConcern::majority())
        .await
        .expect("the sources");
    while let Some(document) = cursor.try_next().await.expect("the sources") {
        if let Ok(key) = document.get_str(key) {
            found.entry(key.to_owned()).or_insert(document);
        }
    }
    found
}

/// The result of a comparison.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Flights compared: all of them.
    pub flights: usize,
    /// Planes and airports compared: all of them.
    pub parents: usize,
    /// Number of documents that differ.
    pub wrong: usize,
    /// The first ten differences.
    pub first: Vec<String>,
    /// Number of copied values.
    pub values: usize,
    /// Flights without a tail number, with a tail number of no plane, and with a destination that is no airport.
    pub holes: [usize; 3],
}

/// The columns of the CSV files and the fields of the rules.
fn known(collection: &str) -> &'static [&'static str] {
    match collection {
        "flights" => &[
            "_id",
            "year",
            "month",
            "day",
            "dep_time",
            "sched_dep_time",
            "dep_delay",
            "arr_time",
            "sched_arr_time",
            "arr_delay",
            "carrier",
            "flight",
            "tailnum",
            "origin",
            "dest",
            "air_time",
            "distance",
            "hour",
            "minute",
            "time_hour",
            "airline_name",
            "origin_airport",
            "dest_airport",
            "plane",
        ],
        "planes" => &[
            "_id",
            "tailnum",
            "year",
            "type",
            "manufacturer",
            "model",
            "engines",
            "seats",
            "speed",
            "engine",
            "last_flights",
            "flights",
            "mean_delay",
        ],
        _ => &["_id", "faa", "name", "lat", "lon", "alt", "tz", "dst", "tzone", "departures", "arrivals"],
    }
}

/// Compares every flight on the server, one after the other, then every plane and airport, and passes each with its
/// expected values to `see`.
pub async fn compare(client: &Client, mut see: impl FnMut(&Document, &[(Rule, Values)])) -> Comparison {
    let mut sources = Sources::read(client).await;
    let mut out = Comparison::default();
    for collection in ["flights", "planes", "airports"] {
        let mut found = client
            .database(DATABASE)
            .collection::<Document>(collection)
            .find(doc! {})
            .batch_size(5000)
            .read_concern(ReadConcern::majority())
            .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
            .await
            .expect(collection);
        while let Some(document) = found.try_next().await.expect(collection) {
            let expected: Vec<(Rule, Values)> =
                Rule::into(collection).map(|rule| (rule, sources.expected(rule, &document))).collect();
            out.take(collection, &document, &expected);
            see(&document, &expected);
            if collection == "flights" {
                out.count_holes(&sources, &document);
                let airline = sources.expected(Rule::Airline, &document).pop().and_then(|(_, name)| name);
                sources.gathered.add(&document, airline);
            }
        }
    }
    out
}

impl Comparison {
    fn take(&mut self, collection: &str, document: &Document, expected: &[(Rule, Values)]) {
        let counter = if collection == "flights" { &mut self.flights } else { &mut self.parents };
        *counter += 1;
        let mut wrong = Vec::new();
        for (path, value) in expected.iter().flat_map(|(_, values)| values) {
            let stored = get(document, path);
            self.values += usize::from(value.is_some());
            // Including the type: 1 is not 1.0, and null is not missing.
            if stored != value.as_ref() {
                wrong.push(format!("{path} is {} and must be {}", show(stored), show(value.as_ref())));
            }
        }
        let known = known(collection);
        wrong.extend(
            document.keys().filter(|name| !known.contains(&name.as_str())).map(|name| format!("{name} is nobody's")),
        );
        if !wrong.is_empty() {
            self.wrong += 1;
            let id = document.get("_id").map(ToString::to_string).unwrap_or_default();
            let room = 10_usize.saturating_sub(self.first.len());
            self.first.extend(wrong.into_iter().take(room).map(|wrong| format!("{collection} {id}: {wrong}")));
        }
    }

    fn count_holes(&mut self, sources: &Sources, flight: &Document) {
        match flight.get_str("tailnum") {
            Err(_) => self.holes[0] += 1,
            Ok(tailnum) if !sources.planes.contains_key(tailnum) => self.holes[1] += 1,
            Ok(_) => {}
        }
        self.holes[2] += usize::from(flight.get_str("dest").is_ok_and(|dest| !sources.airports.contains_key(dest)));
    }
}

fn get<'a>(document: &'a Document, path: &str) -> Option<&'a Bson> {
    match path.split_once('.') {
        None => document.get(path),
        Some((head, rest)) => get(document.get_document(head).ok()?, rest),
    }
}

fn show(value: Option<&Bson>) -> String {
    value.map_or("missing".to_owned(), |value| format!("{value:?}"))
}
