//! `denormd events`: the timeline.

use std::time::Duration;

use crate::{
    cli::Output,
    commands::{Failure, print, print_json, terminal::fitted},
};
use denormd_engine::events::{Event, Journal};
use denormd_model::clock::{millis, wall_millis};
use denormd_mongo::{Server, connect};
use denormd_rules::config::Loaded;

/// Events printed at most.
const LIMIT: i64 = 10_000;

/// Prints the events of the last `since`, oldest first.
pub async fn events(loaded: &Loaded, output: Output, since: Duration) -> Result<(), Failure> {
    let config = &loaded.config;
    let server = Server::new(connect::connect(&config.mongodb.uri).await?);
    let journal = Journal::new(server, &config.state.database, &config.name);
    let from = wall_millis() - millis(since);
    let events = journal.read(from, LIMIT).await?;
    match output {
        Output::Text if events.is_empty() => print("nothing has happened in this time; --since looks further back\n"),
        Output::Text => events.iter().for_each(|event| print(&fitted(&line(event)))),
        Output::Json => print_json(&events),
    }
    Ok(())
}

fn line(event: &Event) -> String {
    let time = bson::DateTime::from_millis(event.time).try_to_rfc3339_string().unwrap_or_default();
    // To the second: `2026-11-20T04:12:09.123Z` has the rest after the 19th character.
    let time = time.get(..19).unwrap_or(&time).replace('T', " ");
    format!("{time}Z  {:<24}  {}  [{}]\n", event.what, event.text, event.instance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_when_what_and_where() {
        let event = Event { instance: "db1:7".to_owned(), ..Event::new(0, "leader", Vec::new(), "leads".to_owned()) };
        assert_eq!(line(&event), "1970-01-01 00:00:00Z  leader                    leads  [db1:7]\n");
    }
}
