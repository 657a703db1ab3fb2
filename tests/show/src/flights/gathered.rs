//! Values of planes and airports that are computed from their flights in one pass: the last ten, the number, the mean
//! delay.

use std::collections::HashMap;

use bson::{Bson, DateTime, Document, doc, oid::ObjectId};

use super::expected::{Rule, Values};

/// Flights inside a plane.
const LAST: usize = 10;

/// The flights so far, by tail number, by origin and by destination.
#[derive(Default)]
pub struct Gathered {
    planes: HashMap<String, Flights>,
    origins: HashMap<String, Flights>,
    dests: HashMap<String, Flights>,
}

#[derive(Default)]
struct Flights {
    count: i32,
    /// The sum of the delays, in minutes, and the number of flights that have one. Whole numbers: their mean is exact
    /// to the bit.
    delays: (i32, i32),
    /// The last flights, oldest first.
    last: Vec<(DateTime, ObjectId, Document)>,
}

impl Gathered {
    /// Adds a flight, with the current name of its airline.
    pub fn add(&mut self, flight: &Document, airline: Option<Bson>) {
        let file = |into: &mut HashMap<String, Flights>, key: &str, delay: &str| {
            // A number, null or a missing value is an empty reference.
            let flights = into.entry(flight.get_str(key).ok()?.to_owned()).or_default();
            flights.add(flight.get_i32(delay).ok());
            Some(())
        };
        file(&mut self.origins, "origin", "dep_delay");
        file(&mut self.dests, "dest", "arr_delay");
        if file(&mut self.planes, "tailnum", "dep_delay").is_some()
            && let Some(plane) = flight.get_str("tailnum").ok().and_then(|tailnum| self.planes.get_mut(tailnum))
        {
            plane.keep_if_late(flight, airline);
        }
    }

    /// The expected result of a rule for the flights with this key.
    pub fn expected(&self, rule: Rule, key: Option<&str>) -> Values {
        let none = Flights::default();
        let of = |flights: &HashMap<String, Flights>, values: &dyn Fn(&Flights) -> Values| {
            values(key.and_then(|key| flights.get(key)).unwrap_or(&none))
        };
        let counted = |names: [&'static str; 2], flights: &Flights| {
            vec![(names[0], Some(Bson::Int32(flights.count))), (names[1], Some(flights.mean()))]
        };
        match rule {
            Rule::LastFlights => of(&self.planes, &|plane| vec![("last_flights", Some(Bson::Array(plane.elements())))]),
            Rule::PlaneFlights => of(&self.planes, &|plane| counted(["flights", "mean_delay"], plane)),
            Rule::Departures => {
                of(&self.origins, &|airport| counted(["departures.count", "departures.mean_delay"], airport))
            }
            Rule::Arrivals => of(&self.dests, &|airport| counted(["arrivals.count", "arrivals.mean_delay"], airport)),
            Rule::Airline | Rule::Origin | Rule::Dest | Rule::Plane => Vec::new(),
        }
    }
}

impl Flights {
    fn add(&mut self, delay: Option<i32>) {
        self.count += 1;
        if let Some(delay) = delay {
            self.delays = (self.delays.0 + delay, self.delays.1 + 1);
        }
    }

    fn mean(&self) -> Bson {
        match self.delays {
            (_, 0) => Bson::Null,
            (sum, count) => Bson::Double(f64::from(sum) / f64::from(count)),
        }
    }

    fn elements(&self) -> Vec<Bson> {
        self.last.iter().map(|(_, _, element)| Bson::Document(element.clone())).collect()
    }

    fn keep_if_late(&mut self, flight: &Document, airline: Option<Bson>) {
        let time = *flight.get_datetime("time_hour").expect("every flight has a time");
        let id = flight.get_object_id("_id").expect("every flight has an ObjectId");
        let place = self.last.partition_point(|(at, other, _)| (*at, *other) < (time, id));
        if place == 0 && self.last.len() == LAST {
            return;
        }
        self.last.insert(place, (time, id, element(flight, airline)));
        if self.last.len() > LAST {
            self.last.remove(0);
        }
    }
}

/// The element of a flight in a plane; a field that the flight lacks is missing in it.
fn element(flight: &Document, airline: Option<Bson>) -> Document {
    let carrier = flight.get_str("carrier").expect("every flight has a carrier");
    let number = flight.get_i32("flight").expect("every flight has a number");
    let mut out = doc! {"flight_id": flight.get("_id").cloned(), "number": format!("{carrier} {number}")};
    let field = |name: &str| flight.get(name).cloned();
    let rest =
        [("airline", airline), ("to", field("dest")), ("time", field("time_hour")), ("delay", field("dep_delay"))];
    out.extend(rest.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    out
}
