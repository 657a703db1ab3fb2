//! Leadership, and the conditions of a leader's writes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Bson, DateTime, Timestamp, doc, rawdoc};
use denormd_engine::{
    checkpoint::{
        rule_record::Agreement,
        store::{Store, claim_term},
    },
    deployment::{
        identity::Identity,
        lease::{COLLECTION, Held, Lease},
    },
};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_model::{
    partition::Partition,
    position::Position,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::{End, Fence, Server, error::Kind};
use tokio::time::timeout;

use crate::support::daemon::PATIENCE;

const TTL: Duration = Duration::from_secs(3);
/// The length of a lease that is given back and taken long before it runs out.
const LONG: Duration = Duration::from_secs(60);

fn contender(test: &TestDb) -> Lease {
    contender_for(test, TTL)
}

fn contender_for(test: &TestDb, ttl: Duration) -> Lease {
    let instance = Identity::of_this_process();
    Lease::new(Server::new(test.client.clone()), &test.name, "default", &instance, ttl)
}

/// The database of a test. The first take-over need not create the collections within the limit of an attempt.
async fn database(test: TestDb) -> TestDb {
    for collection in [COLLECTION, "terms"] {
        test.database().create_collection(collection).await.unwrap();
    }
    test
}

async fn leads(lease: &Lease, within: Duration) -> (Held, Duration) {
    let begun = Instant::now();
    let held = timeout(within, lease.stand_by()).await.expect("a take-over in time");
    (held, begun.elapsed())
}

#[tokio::test]
async fn a_lease_that_is_given_back_is_taken_at_once_and_one_that_is_not_runs_out() {
    let test = database(denormd_fixture::database().await).await;
    let (first, second) = (contender(&test), contender(&test));
    let (held, _) = leads(&first, PATIENCE).await;
    assert!(timeout(TTL * 2, second.stand_by()).await.is_err(), "it is renewed");
    drop(held);
    let mut taken = None;
    // A slow server may not take the release in time.
    for _ in 0..3 {
        let (held, _) = leads(&contender_for(&test, LONG), PATIENCE).await;
        let term = held.term();
        held.release().await;
        taken = timeout(LONG / 2, second.stand_by()).await.ok();
        if let Some(next) = &taken {
            assert!(next.term() > term);
            break;
        }
    }
    let held = taken.expect("it is taken sooner than it runs out");
    let term = held.term();
    drop(held);
    // The instance waits even for itself: its earlier writes may still be in progress.
    let (held, took) = leads(&second, PATIENCE).await;
    assert!(held.term() > term);
    assert!(took > TTL / 2, "the old one still wrote: {took:?}");
}

#[tokio::test]
async fn a_lease_that_was_deleted_or_stolen_is_lost_and_its_term_goes_on() {
    let test = database(denormd_fixture::database().await).await;
    let collection = test.database().collection::<bson::Document>(COLLECTION);
    let (first, second) = (contender(&test), contender(&test));
    let (held, _) = leads(&first, PATIENCE).await;
    let server = Server::new(test.client.clone()).under(held.fence());
    let store = Store::open_partition(&server, &test.name, "default", Partition::WHOLE).await.unwrap();
    let time = server.operation_time().await.unwrap();
    store.save_position(&server, "d", &[], &Position { time, token: None }, None, time).await.unwrap();

    collection.delete_one(doc! {}).await.unwrap();
    let begun = Instant::now();
    let (next, _) = leads(&second, PATIENCE).await;
    assert!(begun.elapsed() >= TTL, "the last owner may not have known");
    timeout(Duration::from_millis(10), held.lost()).await.expect("it has noticed");
    assert!(next.term() > held.term(), "terms go on from those in the state");

    // A position sent by the former leader is refused, before and after the new leader has saved its own.
    let later = Server::new(test.client.clone()).under(next.fence());
    let reopened = Store::open_partition(&later, &test.name, "default", Partition::WHOLE).await.unwrap();
    let stale = Position { time, token: Some(doc! {"x": 1}) };
    let refused = store.save_position(&server, "d", &[], &stale, None, time).await;
    assert!(refused.is_err());
    assert!(held.fence().is_superseded() && !next.fence().is_superseded());
    assert_eq!(reopened.position(&later, "d", &[]).await.unwrap(), Some(Position { time, token: None }));

    collection.update_one(doc! {}, doc! {"$set": {"owner": "somebody"}}).await.unwrap();
    timeout(PATIENCE, next.lost()).await.expect("it has noticed");
}

/// An election that took longer than the rest of the lease once cost a take-over, and the rest of another lease: a
/// renewal that arrived late had extended it.
#[tokio::test]
async fn a_server_that_stands_still_longer_than_a_lease_costs_no_take_over() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let ttl = Duration::from_secs(6);
    let lease = contender_for(&test, ttl);
    let (held, _) = leads(&lease, PATIENCE).await;
    let term = held.term();
    set.node(0).sigstop();
    tokio::time::sleep(ttl + Duration::from_secs(1)).await;
    set.node(0).sigcont();
    let server = Server::new(test.client.clone()).under(held.fence());
    let statement = [rawdoc! {"q": {"_id": 1}, "u": {"$set": {"x": 1}}, "upsert": true}];
    let begun = Instant::now();
    // Until it is renewed, nothing is written.
    while let Err(error) = server.update(&test.name, "c", &statement, ttl).await {
        assert!(begun.elapsed() < PATIENCE, "{}", error.message);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(timeout(Duration::from_millis(10), held.lost()).await.is_err(), "it goes on");
    assert_eq!(held.term(), term);
}

/// The first leader had written nothing when its lease was deleted: the next one once began in the same term, without
/// waiting, and nothing distinguished the writes of the two.
#[tokio::test]
async fn a_lease_that_was_deleted_before_anything_was_written_has_its_term_all_the_same() {
    let test = database(denormd_fixture::database().await).await;
    let collection = test.database().collection::<bson::Document>(COLLECTION);
    let (held, _) = leads(&contender(&test), PATIENCE).await;
    collection.delete_one(doc! {}).await.unwrap();
    let begun = Instant::now();
    let (next, _) = leads(&contender(&test), PATIENCE).await;
    assert!(next.term() > held.term());
    assert!(begun.elapsed() >= TTL, "the last owner may not have known");
    // Also for two that have taken it in the same term, which requires a delete between the read and the take-over.
    let server = Server::new(test.client.clone());
    for (more, is_claimed) in [(0, false), (1, true), (1, false), (-1, false), (3, true)] {
        let term = next.term() + more;
        assert_eq!(claim_term(&server, &test.name, "default", term).await.unwrap(), is_claimed, "{term}");
    }
}

/// Writes that were sent before a rule's state changed, and arrive late.
#[tokio::test]
async fn late_marks_and_prunes_leave_a_newer_state_alone() {
    let test = denormd_fixture::database().await;
    let config = crate::support::daemon::config(
        &test,
        "  - { name: r, copy: { source: a, target: b, match: { x: _id }, set: { y: $y } } }",
    );
    let context = crate::support::daemon::context(&config).await;
    let (server, rule) = (&context.server, &context.plan.rules[0]);
    let store = Store::open(server, &test.name, "default").await.unwrap();
    store.reset_rule(server, rule, &RuleState::BACKFILL, Agreement::Ended).await.unwrap();
    let state = async || store.rules(server).await.unwrap().remove(0).1;
    let old = state().await;
    assert!(store.source_seen(server, "r", old.generation, &Bson::Int32(1)).await.unwrap());
    assert!(state().await.source_seen);
    store.reset_rule(server, rule, &RuleState::Blocked(BlockReason::SourceGone), Agreement::Ended).await.unwrap();
    assert!(!store.ask(server, "r").await.unwrap(), "blocked after the user has looked");
    assert!(
        !store.unblock(server, "r", &BlockReason::RemovalLimit, &rule.definition).await.unwrap(),
        "for another reason"
    );
    assert!(store.unblock(server, "r", &BlockReason::SourceGone, &rule.definition).await.unwrap());
    assert!(!state().await.source_seen, "unblocked: an absent source is an empty one");
    assert!(!store.source_seen(server, "r", old.generation, &Bson::Int32(1)).await.unwrap());
    assert!(!state().await.source_seen, "a mark that comes late");
    store.forget(server, "r", &old, true).await.unwrap();
    assert_eq!(state().await.generation, old.generation + 2, "a prune that comes late");
    store.retire(server, "r", &doc! {"was": "another"}).await.unwrap();
    store.forget(server, "r", &old, false).await.unwrap();
    assert_eq!(state().await.retired, [doc! {"was": "another"}], "retired after the prune");
    store.forget(server, "r", &state().await, false).await.unwrap();
    assert!(state().await.retired.is_empty());
    store.forget(server, "r", &state().await, true).await.unwrap();
    assert!(store.rules(server).await.unwrap().is_empty());
    assert!(!store.ask(server, "r").await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn of_five_contenders_exactly_one_leads() {
    let test = database(denormd_fixture::database().await).await;
    let leading = Arc::new(AtomicUsize::new(0));
    let terms = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (end, limit) = (Instant::now() + Duration::from_secs(9), Instant::now() + PATIENCE);
    let contenders = (0..5_u64).map(|nth| {
        let (lease, leading, terms) = (contender(&test), leading.clone(), terms.clone());
        tokio::spawn(async move {
            let is_over = || Instant::now() > end && terms.lock().unwrap().len() > 4;
            while !is_over() && Instant::now() < limit {
                let Ok(held) = timeout(TTL * 3 / 2, lease.stand_by()).await else { continue };
                assert_eq!(leading.fetch_add(1, Ordering::SeqCst), 0, "two lead");
                terms.lock().unwrap().push(held.term());
                tokio::time::sleep(Duration::from_millis(100 * (nth + 1))).await;
                leading.fetch_sub(1, Ordering::SeqCst);
                // Some instances die.
                if held.term() % 4 == 0 { drop(held) } else { held.release().await }
            }
        })
    });
    futures_util::future::try_join_all(contenders.collect::<Vec<_>>()).await.unwrap();
    let terms = terms.lock().unwrap();
    assert!(terms.len() > 4 && terms.is_sorted_by(|a, b| a < b), "{terms:?}");
}

#[tokio::test]
async fn a_write_that_comes_too_late_writes_nothing_and_says_so() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("t").insert_one(doc! {"_id": 1}).await.unwrap();
    let statement = rawdoc! {"q": {"_id": 1}, "u": {"$set": {"x": 1}}};
    let now = DateTime::now().timestamp_millis();
    let server = Server::new(test.client.clone());
    let written =
        server.update(&test.name, "t", std::slice::from_ref(&statement), Duration::from_secs(5)).await.unwrap();
    assert_eq!((written.matched, written.modified, written.refused.len()), (1, 1, 0));
    // Nothing is written under an expired lease; if the lease expires while the command is on its way, the server
    // refuses it.
    let ended = server.under(Arc::new(Fence::new(1, End { server: now - 1, cluster: now - 1 })));
    assert!(ended.update(&test.name, "t", std::slice::from_ref(&statement), Duration::from_secs(5)).await.is_err());
    // The server refuses late commands: by a statement that goes first, and by a `let` that no statement uses.
    let late = doc! {"$range": [0, 1, {"$cond": [{"$lt": ["$$NOW", DateTime::from_millis(now - 1)]}, 1, 0]}]};
    let write = doc! {"q": {"_id": 1}, "u": {"$set": {"x": 2}}};
    let never = doc! {"q": {"_id": null, "$expr": {"$gt": [late.clone(), [0, 0]]}}, "u": {"$set": {}}};
    for command in [
        doc! {"update": "t", "updates": [never, write.clone()], "ordered": true},
        doc! {"update": "t", "updates": [write], "ordered": false, "let": {"ok": late}},
    ] {
        let reply = db.run_command(command).await.unwrap();
        assert_eq!(reply.get_array("writeErrors").unwrap().len(), 1, "that nothing matched would look like success");
    }
    assert_eq!(crate::support::daemon::all(&db, "t").await, [doc! {"_id": 1, "x": 1}]);
}

#[tokio::test]
async fn what_is_refused_stops_nothing_else_in_its_command() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let validator = doc! {"x": {"$lt": 100}};
    db.create_collection("t").validator(validator).await.unwrap();
    db.collection("t").insert_many((0..6).map(|id| doc! {"_id": id, "x": 0})).await.unwrap();
    // The statement that goes first does not match a document whose _id is null.
    db.collection("t").insert_one(doc! {"_id": null, "x": 0}).await.unwrap();
    let values = [1, 100, 2, 100, 100, 3];
    let statements: Vec<_> =
        (0..).zip(values).map(|(id, x)| rawdoc! {"q": {"_id": id}, "u": {"$set": {"x": x}}}).collect();
    let server = Server::new(test.client.clone());
    for _ in 0..2 {
        let written = server.update(&test.name, "t", &statements, Duration::from_secs(5)).await.unwrap();
        let refused: Vec<usize> = written.refused.iter().map(|(index, _)| *index).collect();
        assert_eq!((written.matched, refused), (3, vec![1, 3, 4]));
    }
    let deletes: Vec<_> = [1, 3].map(|id| rawdoc! {"q": {"_id": id}, "limit": 0}).into();
    server.delete(&test.name, "t", &deletes, Duration::from_secs(5)).await.unwrap();
    let left: Vec<_> =
        crate::support::daemon::all(&db, "t").await.iter().map(|doc| doc.get_i32("x").unwrap()).collect();
    assert_eq!(left, [0, 1, 2, 0, 3]);
}

/// Simulates a member whose clock was ahead as the primary, followed by one whose clock is behind: the cluster time
/// stays.
async fn clock_falls_behind(test: &TestDb, by: Duration) {
    let mut session = test.client.start_session().await.unwrap();
    let ping = doc! {"ping": 1};
    let reply = test.client.database("admin").run_command(ping.clone()).session(&mut session).await.unwrap();
    let known: Timestamp = reply.get_document("$clusterTime").unwrap().get_timestamp("clusterTime").unwrap();
    let ahead = Timestamp { time: known.time + u32::try_from(by.as_secs()).unwrap(), increment: 1 };
    let signature =
        doc! {"hash": bson::Binary { subtype: bson::spec::BinarySubtype::Generic, bytes: vec![0; 20] }, "keyId": 0_i64};
    let ahead = bson::deserialize_from_document(doc! {"clusterTime": ahead, "signature": signature}).unwrap();
    session.advance_cluster_time(&ahead);
    test.client.database("admin").run_command(ping).session(&mut session).await.unwrap();
}

/// The successor took over on a primary whose clock is ahead. On the next primary, by its clock, the predecessor's
/// lease has not expired yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_former_leader_writes_nothing_on_a_primary_whose_clock_is_behind() {
    let set = ReplicaSet::start(1).await;
    let test = database(set.database().await).await;
    test.database().collection("t").insert_one(doc! {"_id": 1}).await.unwrap();
    let lease = contender_for(&test, LONG);
    let (held, _) = leads(&lease, PATIENCE).await;
    let server = Server::new(test.client.clone()).under(held.fence());
    // It is not renewed any more.
    drop(held);
    let write = async |x: i32| {
        let statement = rawdoc! {"q": {"_id": 1}, "u": {"$set": {"x": x}}};
        server.update(&test.name, "t", &[statement], Duration::from_secs(5)).await
    };
    assert_eq!(write(1).await.unwrap().modified, 1);
    clock_falls_behind(&test, Duration::from_secs(90)).await;
    assert_eq!(write(2).await.unwrap_err().kind, Kind::Unavailable);
    assert_eq!(crate::support::daemon::all(&test.database(), "t").await, [doc! {"_id": 1, "x": 1}]);
}

/// The leader renews its lease by the current cluster time. Its successor waits for that time.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_goes_on_where_the_clock_is_behind_and_is_followed_when_the_cluster_time_is_past_its_end() {
    let set = ReplicaSet::start(1).await;
    let test = database(set.database().await).await;
    test.database().collection("t").insert_one(doc! {"_id": 1}).await.unwrap();
    let (first, second) = (contender(&test), contender(&test));
    let (held, _) = leads(&first, PATIENCE).await;
    let server = Server::new(test.client.clone()).under(held.fence());
    let ahead = TTL * 4;
    clock_falls_behind(&test, ahead).await;
    let begun = Instant::now();
    crate::support::daemon::until("a write under a lease that was renewed", async || {
        let statement = rawdoc! {"q": {"_id": 1}, "u": {"$inc": {"x": 1}}};
        server.update(&test.name, "t", &[statement], Duration::from_secs(5)).await.ok()
    })
    .await;
    drop(held);
    leads(&second, PATIENCE).await;
    assert!(begun.elapsed() >= ahead, "taken over after {:?}", begun.elapsed());
    // A time too far in the future to wait for does not count.
    clock_falls_behind(&test, Duration::from_secs(24 * 3600)).await;
    let (held, _) = leads(&second, PATIENCE).await;
    drop(held);
    leads(&first, PATIENCE).await;
}
