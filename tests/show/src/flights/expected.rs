//! What each flight must look like, worked out a second time from the sources alone: `config/flights.yaml` in plain Rust.

use std::collections::HashMap;

use bson::{Bson, Document, doc};
use futures_util::TryStreamExt;
use mongodb::{
    Client, Database,
    options::{ReadConcern, SelectionCriteria},
};

use super::DATABASE;

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
}

impl Rule {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Airline, Self::Origin, Self::Dest, Self::Plane];

    /// The flight's field that refers to the source.
    pub fn reference(self) -> &'static str {
        match self {
            Self::Airline => "carrier",
            Self::Origin => "origin",
            Self::Dest => "dest",
            Self::Plane => "tailnum",
        }
    }

    /// The paths that are copied, and the value of each for a source document; `None` where there is to be none.
    fn values(self, source: Option<&Document>) -> Vec<(&'static str, Option<Bson>)> {
        let field = |name: &str| source.and_then(|source| source.get(name)).cloned();
        match self {
            Self::Airline => vec![("airline_name", field("name"))],
            Self::Origin => vec![("origin_airport.name", field("name")), ("origin_airport.tzone", field("tzone"))],
            Self::Dest => vec![(
                "dest_airport",
                source.map(|source| Bson::Document(part(source, &["name", "lat", "lon", "alt", "tzone"]))),
            )],
            Self::Plane => {
                vec![("plane.year", field("year")), ("plane.model", source.map(model)), ("plane.seats", field("seats"))]
            }
        }
    }
}

/// The fields that are there, in this order.
fn part(source: &Document, names: &[&str]) -> Document {
    names.iter().filter_map(|name| Some(((*name).to_owned(), source.get(*name)?.clone()))).collect()
}

/// `$concat` of what is missing is null.
fn model(plane: &Document) -> Bson {
    match (plane.get_str("manufacturer"), plane.get_str("model")) {
        (Ok(manufacturer), Ok(model)) => Bson::String(format!("{manufacturer} {model}")),
        _ => Bson::Null,
    }
}

/// The sources as they are on the server now, by key.
pub struct Sources {
    airlines: HashMap<String, Document>,
    airports: HashMap<String, Document>,
    planes: HashMap<String, Document>,
}

impl Sources {
    /// Reads them.
    pub async fn read(client: &Client) -> Self {
        let database = client.database(DATABASE);
        Self {
            airlines: by_key(&database, "airlines", "carrier").await,
            airports: by_key(&database, "airports", "faa").await,
            planes: by_key(&database, "planes", "tailnum").await,
        }
    }

    /// The copied paths of a rule in a flight, with their values.
    pub fn expected(&self, rule: Rule, flight: &Document) -> Vec<(&'static str, Option<Bson>)> {
        let sources = match rule {
            Rule::Airline => &self.airlines,
            Rule::Origin | Rule::Dest => &self.airports,
            Rule::Plane => &self.planes,
        };
        rule.values(flight.get_str(rule.reference()).ok().and_then(|key| sources.get(key)))
    }
}

/// Of several with one key, the first by `_id`.
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

/// What a comparison found.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Flights compared: all of them.
    pub flights: usize,
    /// How many of them are not as they must be.
    pub wrong: usize,
    /// The first ten differences.
    pub first: Vec<String>,
    /// Copied values there are.
    pub values: usize,
    /// Flights without a tail number, whose tail number no plane has, and whose destination no airport is.
    pub holes: [usize; 3],
}

/// The columns of the CSV file and what the rules add.
const KNOWN: &[&str] = &[
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
];

/// Compares every flight on the server, one after the other, and shows each with its sources to `see`.
pub async fn compare(client: &Client, mut see: impl FnMut(&Sources, &Document)) -> Comparison {
    let sources = Sources::read(client).await;
    let mut out = Comparison::default();
    let mut flights = client
        .database(DATABASE)
        .collection::<Document>("flights")
        .find(doc! {})
        .batch_size(5000)
        .read_concern(ReadConcern::majority())
        .selection_criteria(SelectionCriteria::ReadPreference(mongodb::options::ReadPreference::Primary))
        .await
        .expect("the flights");
    while let Some(flight) = flights.try_next().await.expect("the flights") {
        out.flights += 1;
        let mut wrong = Vec::new();
        for rule in Rule::ALL {
            for (path, value) in sources.expected(rule, &flight) {
                let stored = get(&flight, path);
                out.values += usize::from(value.is_some());
                // Type and all: 1 is not 1.0, and null is not missing.
                if stored != value.as_ref() {
                    wrong.push(format!("{path} is {} and must be {}", show(stored), show(value.as_ref())));
                }
            }
        }
        wrong.extend(
            flight.keys().filter(|name| !KNOWN.contains(&name.as_str())).map(|name| format!("{name} is nobody's")),
        );
        if !wrong.is_empty() {
            out.wrong += 1;
            let id = flight.get("_id").map(ToString::to_string).unwrap_or_default();
            let room = 10_usize.saturating_sub(out.first.len());
            out.first.extend(wrong.into_iter().take(room).map(|wrong| format!("flight {id}: {wrong}")));
        }
        match flight.get_str("tailnum") {
            Err(_) => out.holes[0] += 1,
            Ok(tailnum) if !sources.planes.contains_key(tailnum) => out.holes[1] += 1,
            Ok(_) => {}
        }
        out.holes[2] += usize::from(flight.get_str("dest").is_ok_and(|dest| !sources.airports.contains_key(dest)));
        see(&sources, &flight);
    }
    out
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
