//! Clock differences between the members of a replica set.

use std::{sync::Arc, time::Duration};

use bson::{Bson, doc};
use futures_util::future::join_all;
use mongodb::{Client, options::SelectionCriteria};

use crate::{
    Server,
    error::{Error, Result},
};
use denormd_model::clock::wall_millis;

/// Difference in seconds from which a warning is due.
pub const LARGE: f64 = 10.0;
/// Time limit for a member's answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The least possible difference between the clocks of the members, in seconds: the round-trip time is not counted.
/// Members that do not answer are left out. None if none answers.
pub async fn skew(server: &Server) -> Option<f64> {
    let (hello, client) = (server.hello().await.ok()?, server.client());
    let hosts = ["hosts", "passives"].into_iter().filter_map(|list| hello.get_array(list).ok()).flatten();
    let hosts: Vec<String> = hosts.filter_map(Bson::as_str).map(str::to_lowercase).collect();
    let asked = join_all(hosts.into_iter().map(|host| tokio::time::timeout(TIMEOUT, ahead(client, host)))).await;
    let ahead: Vec<(i64, i64)> = asked.into_iter().filter_map(|answer| answer.ok()?.ok()).collect();
    differ(&ahead)
}

/// Lead of a member's clock over the local one, in milliseconds: lower and upper bound.
async fn ahead(client: &Client, host: String) -> Result<(i64, i64)> {
    let is_host =
        SelectionCriteria::Predicate(Arc::new(move |server| server.address().to_string().to_lowercase() == host));
    let sent = wall_millis();
    let reply = client.database("admin").run_command(doc! {"hello": 1}).selection_criteria(is_host).await?;
    let answered = wall_millis();
    let time = reply.get_datetime("localTime").map_err(|_| Error::internal("no local time"))?.timestamp_millis();
    Ok((time - answered, time - sent))
}

fn differ(ahead: &[(i64, i64)]) -> Option<f64> {
    let most = ahead.iter().map(|(least, _)| *least).max()?;
    let least = ahead.iter().map(|(_, most)| *most).min()?;
    let millis = u32::try_from((most - least).max(0)).unwrap_or(u32::MAX);
    Some(f64::from(millis) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_way_there_and_back_explains_is_no_difference() {
        assert_eq!(differ(&[(-20, 20), (-5, 30), (10, 12)]), Some(0.0));
        assert_eq!(differ(&[(-20, 20), (5_020, 5_070)]), Some(5.0));
        assert_eq!(differ(&[(-7_020, -7_000), (0, 10), (-3, 3)]), Some(7.0));
        assert_eq!(differ(&[(90_000, 90_010)]), Some(0.0), "one clock alone does not differ");
        assert_eq!(differ(&[]), None);
    }
}
