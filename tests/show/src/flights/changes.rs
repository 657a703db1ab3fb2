//! An application's changes while the daemon runs: sources are renamed, deleted and inserted again; flights are added,
//! change planes, are late, are postponed, are cancelled and deleted.

use std::collections::BTreeSet;

use bson::{Bson, DateTime, Document, doc, oid::ObjectId};
use futures_util::TryStreamExt;
use mongodb::{Client, Collection, Database, options::ReturnDocument};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom, seq::SliceRandom};

use super::{DATABASE, expected::Rule};

/// One change.
#[derive(Debug, Clone)]
enum Change {
    RenameAirline(String),
    RenameAirport(String),
    /// Deletes a plane, whose flights lose its values.
    DeletePlane(String),
    /// Inserts a plane again as a new document, with another model.
    InsertPlane(String),
    /// A second document with the same tail number: the first by `_id` counts.
    DoublePlane(String),
    /// A copy of a flight under a new `_id`, including its copied fields, which may be wrong for it.
    InsertFlight,
    RepointFlight,
    /// Another delay, or none, because the flight was cancelled.
    DelayFlight,
    /// Another hour, and therefore another position among the last flights of its plane.
    PutOffFlight,
    DeleteFlight,
    /// Deletes the last flight of a plane: the eleventh from the end enters the list.
    DeleteLastFlight(String),
}

/// The changes of a round, and the documents that they affect.
#[derive(Debug, Default)]
pub struct Touched {
    /// Writes to sources.
    pub sources: usize,
    /// Writes to flights.
    pub flights: usize,
    /// Keys whose flights all have to be compared.
    keys: BTreeSet<(Rule, String)>,
    /// Flights that have to be compared individually.
    ids: BTreeSet<ObjectId>,
    /// True if an airline was renamed. Each has flights among the last ones of most planes.
    airlines: bool,
}

impl Touched {
    /// True if a value that a rule copies into a document may have changed.
    pub fn has(&self, rule: Rule, target: &Document) -> bool {
        let key = target.get_str(rule.reference()).ok();
        key.is_some_and(|key| self.keys.contains(&(rule, key.to_owned())))
            || target.get_object_id("_id").is_ok_and(|id| self.ids.contains(&id))
            || (rule == Rule::LastFlights && self.airlines)
    }

    /// Records that a flight is, or just was, among those of its plane and its airports.
    fn flight(&mut self, flight: &Document) {
        for (rule, field) in [
            (Rule::LastFlights, "tailnum"),
            (Rule::PlaneFlights, "tailnum"),
            (Rule::Departures, "origin"),
            (Rule::Arrivals, "dest"),
        ] {
            self.keys.extend(flight.get_str(field).ok().map(|key| (rule, key.to_owned())));
        }
        self.ids.extend(flight.get_object_id("_id"));
    }
}

/// Users of the database, independent of the daemon.
pub struct Users {
    random: StdRng,
    database: Database,
    carriers: Vec<String>,
    /// Destinations of flights.
    dests: Vec<String>,
    tailnums: Vec<String>,
    flights: Vec<ObjectId>,
    renames: u32,
    /// Their changes so far.
    pub touched: Touched,
}

async fn distinct(database: &Database, collection: &str, field: &str) -> Vec<String> {
    let found = database.collection::<Document>(collection).distinct(field, doc! {}).await.expect("the keys");
    found.into_iter().filter_map(|key| key.as_str().map(str::to_owned)).collect()
}

impl Users {
    /// Users who make the same changes for the same seed.
    pub async fn new(client: &Client, seed: u64) -> Self {
        let database = client.database(DATABASE);
        let every_hundredth = [
            doc! {"$match": {"minute": 30}},
            doc! {"$sort": {"_id": 1}},
            doc! {"$limit": 5000},
            doc! {"$project": {"_id": 1}},
        ];
        let flights: Vec<Document> = database
            .collection::<Document>("flights")
            .aggregate(every_hundredth)
            .await
            .expect("flights")
            .try_collect()
            .await
            .expect("flights");
        Self {
            random: StdRng::seed_from_u64(seed),
            carriers: distinct(&database, "airlines", "carrier").await,
            dests: distinct(&database, "flights", "dest").await,
            tailnums: distinct(&database, "planes", "tailnum").await,
            flights: flights.iter().filter_map(|flight| flight.get_object_id("_id").ok()).collect(),
            database,
            renames: 0,
            touched: Touched::default(),
        }
    }

    fn collection(&self, name: &str) -> Collection<Document> {
        self.database.collection(name)
    }

    /// Renames one airline. Returns its new name.
    pub async fn rename_airline(&mut self, carrier: &str) -> String {
        self.renames += 1;
        let name = format!("{carrier} Airways, name {}", self.renames);
        self.touch(&[Rule::Airline], carrier);
        self.touched.airlines = true;
        self.collection("airlines")
            .update_one(doc! {"carrier": carrier}, doc! {"$set": {"name": &name}})
            .await
            .expect("an update");
        name
    }

    fn touch(&mut self, rules: &[Rule], key: &str) {
        self.touched.sources += 1;
        self.touched.keys.extend(rules.iter().map(|rule| (*rule, key.to_owned())));
    }

    /// About 1,000 changes in a random order: every airline, fifty airports, planes that are deleted and inserted,
    /// single flights.
    pub async fn round(&mut self) {
        let mut changes: Vec<Change> = self.carriers.iter().cloned().map(Change::RenameAirline).collect();
        // The large ones again: renamed while their last rename is still being copied.
        changes.extend(["UA", "UA", "B6", "EV"].map(|carrier| Change::RenameAirline(carrier.to_owned())));
        changes.extend(self.dests.choose_multiple(&mut self.random, 50).cloned().map(Change::RenameAirport));
        changes.push(Change::RenameAirport("JFK".to_owned()));
        for tailnum in self.tailnums.choose_multiple(&mut self.random, 60).cloned().collect::<Vec<_>>() {
            changes.push(Change::DeletePlane(tailnum.clone()));
            match self.random.random_range(0..4) {
                0 => {}
                1 => changes.push(Change::DoublePlane(tailnum)),
                _ => changes.push(Change::InsertPlane(tailnum)),
            }
        }
        let losing = self.tailnums.choose_multiple(&mut self.random, 60).cloned().collect::<Vec<_>>();
        changes.extend(losing.into_iter().map(Change::DeleteLastFlight));
        for (change, times) in [
            (Change::InsertFlight, 100),
            (Change::RepointFlight, 200),
            (Change::DelayFlight, 200),
            (Change::PutOffFlight, 100),
            (Change::DeleteFlight, 100),
        ] {
            changes.extend(std::iter::repeat_n(change, times));
        }
        changes.shuffle(&mut self.random);
        for change in changes {
            self.perform(change).await;
        }
    }

    async fn perform(&mut self, change: Change) {
        match change {
            Change::RenameAirline(carrier) => {
                self.rename_airline(&carrier).await;
            }
            Change::RenameAirport(faa) => {
                self.renames += 1;
                let set = match self.random.random_range(0..4) {
                    0 => doc! {"$unset": {"tzone": ""}, "$set": {"alt": self.random.random_range(0..9000)}},
                    1 => doc! {"$set": {"tzone": "Etc/UTC", "lat": self.random.random_range(-90.0..90.0)}},
                    _ => doc! {"$set": {"name": format!("{faa} Field, name {}", self.renames)}},
                };
                self.touch(&[Rule::Origin, Rule::Dest], &faa);
                self.collection("airports").update_one(doc! {"faa": faa}, set).await.expect("an update");
            }
            Change::DeletePlane(tailnum) => {
                self.touch(&[Rule::Plane], &tailnum);
                self.collection("planes").delete_one(doc! {"tailnum": tailnum}).await.expect("a delete");
            }
            Change::InsertPlane(tailnum) | Change::DoublePlane(tailnum) => {
                self.touch(&[Rule::Plane, Rule::LastFlights, Rule::PlaneFlights], &tailnum);
                let plane = doc! {"tailnum": tailnum, "manufacturer": "AIRBUS", "model": format!("A{}", self.random.random_range(100..400)), "seats": 179};
                self.collection("planes").insert_one(plane).await.expect("an insert");
            }
            Change::InsertFlight => self.insert_flight().await,
            Change::RepointFlight => self.repoint_flight().await,
            Change::DelayFlight => {
                let update = match self.random.random_range(0..5) {
                    0 => doc! {"$unset": {"dep_delay": "", "arr_delay": ""}},
                    1 => doc! {"$set": {"dep_delay": Bson::Null}},
                    _ => {
                        let mut late = || self.random.random_range(-30..300);
                        doc! {"$set": {"dep_delay": late(), "arr_delay": late()}}
                    }
                };
                self.edit_flight(update).await;
            }
            Change::PutOffFlight => {
                // An hour of the year 2013, so that some become the last flight of their plane, and others stop being
                // it.
                let hour = 1_357_000_000_000 + self.random.random_range(0..8760) * 3_600_000_i64;
                self.edit_flight(doc! {"$set": {"time_hour": DateTime::from_millis(hour)}}).await;
            }
            Change::DeleteFlight => {
                let place = self.random.random_range(0..self.flights.len());
                let id = self.flights.swap_remove(place);
                self.delete_flight(doc! {"_id": id}).await;
            }
            Change::DeleteLastFlight(tailnum) => self.delete_flight(doc! {"tailnum": tailnum}).await,
        }
    }

    /// If several match, the last one.
    async fn delete_flight(&mut self, which: Document) {
        let last = doc! {"time_hour": -1, "_id": -1};
        let flights = self.collection("flights");
        if let Some(gone) = flights.find_one_and_delete(which).sort(last).await.expect("a delete") {
            self.touched.flights += 1;
            self.touched.flight(&gone);
            let id = gone.get_object_id("_id").ok();
            self.flights.retain(|flight| Some(*flight) != id);
        }
    }

    async fn edit_flight(&mut self, update: Document) {
        let id = *self.flights.choose(&mut self.random).expect("flights");
        let flights = self.collection("flights");
        let after = flights.find_one_and_update(doc! {"_id": id}, update).return_document(ReturnDocument::After);
        if let Some(flight) = after.await.expect("an update") {
            self.touched.flights += 1;
            self.touched.flight(&flight);
        }
    }

    async fn insert_flight(&mut self) {
        let id = *self.flights.choose(&mut self.random).expect("flights");
        let Some(mut flight) = self.collection("flights").find_one(doc! {"_id": id}).await.expect("a flight") else {
            return;
        };
        let new = ObjectId::new();
        flight.insert("_id", new);
        flight.extend(self.references());
        self.touched.flights += 1;
        self.touched.flight(&flight);
        self.flights.push(new);
        self.collection("flights").insert_one(flight).await.expect("an insert");
    }

    async fn repoint_flight(&mut self) {
        let id = *self.flights.choose(&mut self.random).expect("flights");
        let update = match self.random.random_range(0..8) {
            0 => doc! {"$unset": {"tailnum": ""}},
            1 => doc! {"$set": {"tailnum": Bson::Null}},
            2 => doc! {"$set": {"dest": "nowhere"}},
            _ => doc! {"$set": self.references()},
        };
        let flights = self.collection("flights");
        // The old document, for the parents that lose it, and the new one.
        let Some(before) = flights.find_one_and_update(doc! {"_id": id}, update).await.expect("an update") else {
            return;
        };
        let after = flights.find_one(doc! {"_id": id}).await.expect("a flight").expect("nobody else deletes flights");
        self.touched.flights += 1;
        self.touched.flight(&before);
        self.touched.flight(&after);
    }

    fn references(&mut self) -> Document {
        let mut pick = |from: &[String]| from.choose(&mut self.random).cloned().unwrap_or_default();
        doc! {"carrier": pick(&self.carriers), "dest": pick(&self.dests), "tailnum": pick(&self.tailnums)}
    }
}
