//! Fan-out jobs: fan-outs too large for one command. The targets of one key are written page by page through the common
//! queue.
//!
//! A job is recorded before the checkpoint passes the event that caused it ([`crate::checkpoint::fan_out`]). Its
//! progress is saved once a page is acknowledged, while the next one is written. If the key changes in the meantime,
//! the current pass continues to the last target, and another pass over all targets follows: otherwise a key that
//! changes faster than a pass takes would never finish. The remaining targets of the current pass get the newest
//! values.
//!
//! Architecture invariant: **a fan-out job is done when a whole pass has been made that began after the last request
//! for it.** Until then it stays recorded, from the first target on. So a crash in a pass whose key has changed costs
//! that pass, but no target.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use bson::{Bson, RawDocumentBuf, oid::ObjectId};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::fan_out::{FanOut, Subject},
    jobs::{Report, mailbox::Mailbox},
    reconcile::{
        Context,
        find::request_of_found,
        read::{self, id_of},
        scan::{self, Wanted},
    },
    request::{Page, Request, Scope, Task},
};
use denormd_model::{failpoint, key::Key, position::ClusterTime};
use denormd_mongo::{
    code,
    command::limited,
    error::{Error, Kind, Result},
};
use denormd_rules::plan::Rule;

/// Targets in one page.
const PAGE: usize = 5000;
/// Fan-out jobs that run at the same time; others wait.
const AT_ONCE: usize = 4;
/// Pause after a failure.
const PAUSE: Duration = Duration::from_secs(1);
/// Interval between searches for jobs that are recorded but not running here: records that were written late, after the
/// job requested in their place was done.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Runs the requested fan-out jobs until `stop`.
pub async fn run(
    context: Arc<Context>,
    asked: Arc<Mailbox<Subject, FanOut>>,
    out: mpsc::Sender<Page>,
    reports: mpsc::Sender<Report>,
    stop: CancellationToken,
) {
    let mut waiting: Vec<FanOut> = Vec::new();
    // The newest request of each running job.
    let mut running: HashMap<Subject, FanOut> = HashMap::new();
    let mut tasks = JoinSet::new();
    let mut look = tokio::time::interval_at(tokio::time::Instant::now() + POLL_INTERVAL, POLL_INTERVAL);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        while let Some(job) = waiting.pop_if(|_| running.len() < AT_ONCE) {
            running.insert(job.subject.clone(), job.clone());
            tasks.spawn(patiently(context.clone(), job, out.clone(), reports.clone(), stop.clone()));
        }
        tokio::select! {
            jobs = asked.wait() => for job in jobs {
                let waits = waiting.iter_mut().find(|other| other.subject == job.subject);
                // A running job cannot save its progress any more, and another pass follows. A waiting job keeps its
                // place.
                match running.get_mut(&job.subject).or(waits) {
                    Some(newest) => *newest = job,
                    None => waiting.insert(0, job),
                }
            },
            Some(ended) = tasks.join_next() => {
                let ended = ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
                let Some(ended) = ended else { return };
                let Some(newest) = running.remove(&ended.asked.subject) else { continue };
                let is_done = |done| newest.request == ended.asked.request || newest.request == done;
                // Waiting jobs run before the next pass of this one.
                if !ended.done.is_some_and(is_done) {
                    waiting.insert(0, newest);
                } else if reports.send(Report::FannedOut(newest)).await.is_err() {
                    return;
                }
            }
            _ = look.tick() => {
                let recorded = async {
                    context.fan_outs.retain(&context.server, &context.plan).await?;
                    context.fan_outs.all(&context.server, &context.plan).await
                };
                let recorded = match recorded.await {
                    Ok(recorded) => recorded,
                    Err(error) => {
                        tracing::warn!(error = %error.message, "the fan-out jobs cannot be read; trying again");
                        context.metrics.record_error(None, "read the fan-out jobs", &error);
                        continue;
                    }
                };
                let known = |job: &FanOut| {
                    running.contains_key(&job.subject) || waiting.iter().any(|other| other.subject == job.subject)
                };
                let unknown: Vec<FanOut> = recorded.into_iter().filter(|job| !known(job)).collect();
                waiting.extend(unknown);
            }
            () = stop.cancelled() => return,
        }
    }
}

/// One pass of a fan-out job over its targets.
struct Pass<'a> {
    runner: &'a JobRunner<'a>,
    /// Position that this pass started after.
    begun: Option<Bson>,
    /// Reads are at least as new as this time.
    time: ClusterTime,
    /// Number of targets done.
    targets: usize,
}

impl Pass<'_> {
    /// Reads all targets that `rule` chooses with one cursor. Returns false if the job was superseded or no longer exists.
    async fn in_one_read(&mut self, job: &mut FanOut, rule: &Rule) -> Result<bool> {
        let context = self.runner.context;
        let Subject { task, key, .. } = &job.subject;
        let Some(command) = read::found_in_order(rule, *task, key, job.after.as_ref()) else { return Ok(true) };
        let command = limited(command, context.limits.read_timeout);
        let mut pages = context.server.pages(&rule.target.namespace.database, command, self.time).await?;
        while let Some(rows) = pages.next().await? {
            for rows in rows.chunks(PAGE) {
                let last = rows.last().map(id_of).transpose()?;
                let last = last.and_then(|id| id.values().first().cloned());
                if !self.page(job, rows, last).await? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Reads by the index on `_id` instead: each part takes a short time to read, and progress is recorded after it.
    async fn in_parts(&mut self, job: &mut FanOut) -> Result<bool> {
        let JobRunner { context, rule, .. } = self.runner;
        let Some(command) = read::found(rule, job.subject.task, &[&job.subject.key]) else { return Ok(true) };
        let of = |name: &str| command.get_document(name).cloned().unwrap_or_default();
        let (filter, projection) = (of("filter"), of("projection"));
        loop {
            let wanted = Wanted { filter: &filter, projection: &projection, limit: PAGE };
            let page = scan::page_of(context, rule, wanted, job.after.as_ref(), self.time).await?;
            if !self.page(job, &page.targets, page.reached()?).await? {
                return Ok(false);
            }
            if page.last.is_none() {
                return Ok(true);
            }
        }
    }

    /// Requests the targets of a page, which ends at `reached`, and waits until they are done. Returns false if the job
    /// no longer exists.
    async fn page(&mut self, job: &mut FanOut, rows: &[RawDocumentBuf], reached: Option<Bson>) -> Result<bool> {
        let JobRunner { context, rule, out } = self.runner;
        let Subject { task, key, .. } = &job.subject;
        let requests = self.runner.requests(*task, key, rows)?;
        let named = requests.iter().find_map(|request| match &request.scope {
            Scope::Named(ids) if *task == Task::Value => Some(ids.clone()),
            _ => None,
        });
        context.memory.fan_outs.asks_page(&job.subject, named);
        let mut page = Page::send(out, requests, self.time).await?;
        // The progress is recorded while the next page is written: a page that is written twice does no harm.
        let moved = job.after != self.begun;
        let recorded =
            async { if moved { context.fan_outs.advance(&context.server, rule, job).await } else { Ok(true) } };
        let (done, recorded) = tokio::join!(page.done(), recorded);
        done?;
        context.memory.fan_outs.asks_page(&job.subject, None);
        failpoint::here("fan-out-page-done");
        self.targets += rows.len();
        job.after = reached.or(job.after.take());
        // Refused if the job was requested again; the pass continues all the same.
        Ok(recorded? || self.runner.recorded_anew(job).await?.is_some())
    }
}

struct Ended {
    /// The request that started the pass.
    asked: FanOut,
    /// The request that is done, which may be newer. None if the job was requested again during the pass.
    done: Option<ObjectId>,
}

/// Makes one pass, with retries until it succeeds. None if it was stopped.
async fn patiently(
    context: Arc<Context>,
    asked: FanOut,
    out: mpsc::Sender<Page>,
    reports: mpsc::Sender<Report>,
    stop: CancellationToken,
) -> Option<Ended> {
    let mut job = None;
    let rule = context.plan.rule(asked.subject.rule).clone();
    let runner = JobRunner { context: &context, rule: &rule, out: &out };
    loop {
        let result = stop.run_until_cancelled(runner.run(&asked, &mut job)).await?;
        let error = match result {
            Ok(done) => return Some(Ended { asked, done }),
            Err(error) => error,
        };
        tracing::warn!(rule = %rule.name, error = %error.message, "the fan-out was interrupted; retrying");
        context.metrics.record_error(Some(&rule.name), "fan-out", &error);
        if error.code == Some(code::UNAUTHORIZED) {
            // If the pipeline has ended, nobody needs the report.
            reports.send(Report::Refused(rule.id, error.message)).await.ok();
            // The job ended with its rule, which is unavailable now.
            if let Ok(None) = context.fan_outs.recorded(&context.server, &rule, &asked.subject).await {
                let done = Some(asked.request);
                return Some(Ended { asked, done });
            }
        }
        stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await?;
    }
}

struct JobRunner<'a> {
    context: &'a Context,
    rule: &'a Rule,
    out: &'a mpsc::Sender<Page>,
}

impl JobRunner<'_> {
    /// Makes one pass of the recorded job; `job` is its progress. Returns the request that is done, unless a newer one
    /// was recorded.
    ///
    /// The recorded request decides, because this process may not know it: a record whose answer was lost may have been
    /// written after all, in place of the later request. Once nothing is recorded, the job is done.
    async fn run(&self, asked: &FanOut, job: &mut Option<FanOut>) -> Result<Option<ObjectId>> {
        let Context { server, fan_outs, .. } = self.context;
        let job = match job {
            Some(job) => job,
            None => {
                let Some(recorded) = fan_outs.recorded(server, self.rule, &asked.subject).await? else {
                    return Ok(Some(asked.request));
                };
                tracing::info!(rule = %self.rule.name, resumed = recorded.after.is_some(), "fan-out started");
                job.insert(recorded)
            }
        };
        if self.pass(job).await? || self.recorded_anew(job).await?.is_none() {
            return Ok(Some(job.request));
        }
        tracing::info!(rule = %self.rule.name, "the fan-out was requested again: another pass follows");
        Ok(None)
    }

    /// The newer request recorded in place of this one, whose progress was refused. None when nothing is recorded any
    /// more.
    async fn recorded_anew(&self, job: &FanOut) -> Result<Option<FanOut>> {
        let recorded = self.context.fan_outs.recorded(&self.context.server, self.rule, &job.subject).await?;
        match recorded {
            Some(recorded) if recorded.request == job.request => {
                Err(Error::new(Kind::Unavailable, "another instance has become the leader"))
            }
            recorded => Ok(recorded),
        }
    }

    /// Continues after `job.after` to the last target, and updates it. Returns false if the job was requested again in
    /// the meantime, or no longer exists.
    ///
    /// One read finds and sorts all targets. If they are too many for that, the collection is read a part at a time.
    async fn pass(&self, job: &mut FanOut) -> Result<bool> {
        let server = &self.context.server;
        let time = server.operation_time().await?;
        let mut pass = Pass { runner: self, begun: job.after.clone(), time, targets: 0 };
        let done = if job.in_parts {
            pass.in_parts(job).await?
        } else {
            let read = match pass.in_one_read(job, self.rule).await {
                // `where` cannot be evaluated on one of them. Each write names it again: only that one becomes a dead letter.
                Err(error) if read::where_fails(self.rule, &error) => {
                    pass.in_one_read(job, &self.rule.without_target_filter()).await
                }
                read => read,
            };
            match read {
                Err(error) if error.kind == Kind::ReadTimedOut && job.after == pass.begun => {
                    tracing::info!(rule = %self.rule.name, "one read for all targets takes too long: reading the collection in parts");
                    // The order may differ: it restarts with the first part, and stays with parts from then on.
                    (job.in_parts, job.after, pass.begun) = (true, None, None);
                    pass.in_parts(job).await?
                }
                done => done?,
            }
        };
        if !done {
            return Ok(false);
        }
        let targets = pass.targets;
        failpoint::here("fan-out-closing");
        let closed = self.context.fan_outs.close(server, self.rule, job).await?;
        if closed {
            tracing::info!(rule = %self.rule.name, targets, "fan-out done");
        }
        Ok(closed)
    }

    fn requests(&self, task: Task, key: &Key, rows: &[RawDocumentBuf]) -> Result<Vec<Request>> {
        if task == Task::Value && !rows.is_empty() {
            let ids: HashSet<Key> = rows.iter().map(id_of).collect::<Result<_>>()?;
            return Ok(vec![Request { rule: self.rule.id, task, key: key.clone(), scope: Scope::Named(ids) }]);
        }
        let requests = rows.iter().map(|row| request_of_found(self.rule, task, row));
        Ok(requests.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }
}
