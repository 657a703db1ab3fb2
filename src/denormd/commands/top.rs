//! `denormd top`: the running daemon's status as a live view of the terminal.
//!
//! One task polls the daemon. The loop draws a frame after each answer, each key and each second: what is on the screen
//! is a function of the [`Model`] alone ([`view::draw`]).

pub mod model;
mod order;
mod rule;
mod table;
mod text;
pub mod theme;
pub mod view;

use std::{
    io::{IsTerminal, stdin, stdout},
    time::Duration,
};

use crossterm::event::EventStream;
use futures_util::StreamExt;
use ratatui::DefaultTerminal;
use tokio::{sync::mpsc, time::MissedTickBehavior};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    cli::Output,
    commands::Failure,
    server::client::{self, Daemon},
    status::Status,
};
use denormd_model::clock::wall_millis;
use denormd_mongo::error::{Error, Kind, Result};
use model::{Model, Next};
use theme::Theme;

/// Interval between two polls, and between two frames: the daemon computes its figures once a second.
const EVERY: Duration = Duration::from_secs(1);
/// Time limit for an answer. The view calls the state unknown as soon as it has passed.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Shows the status of the running daemon until the user quits. A daemon that does not answer is asked again.
pub async fn top(output: Output, daemon: Daemon) -> Result<(), Failure> {
    suits(output, stdin().is_terminal() && stdout().is_terminal())?;
    let mut model = Model::new(daemon.address.to_string(), Theme::of(&stdout()), wall_millis());
    let first = ask(&daemon).await;
    // A token that is missing does not come by waiting.
    if let Err(error) = &first
        && error.kind == Kind::Config
    {
        return first.map(drop).map_err(Failure::from);
    }
    model.take(first, wall_millis());
    let mut terminal = ratatui::try_init().map_err(|error| unusable(&error))?;
    let (answers, received) = mpsc::channel(1);
    let polling = AbortOnDropHandle::new(tokio::spawn(poll(daemon, answers)));
    let outcome = follow(&mut terminal, &mut model, received).await;
    drop(polling);
    ratatui::restore();
    outcome.map_err(|error| unusable(&error).into())
}

/// Refuses an output that is not a terminal, or JSON.
fn suits(output: Output, is_terminal: bool) -> Result<()> {
    let refused = |why: &str| Error::new(Kind::Config, why);
    if output == Output::Json {
        return Err(refused("`denormd top` draws on a terminal and prints no JSON")
            .hint("`denormd status --output json` prints the same figures once"));
    }
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    if !is_terminal || dumb {
        return Err(refused("`denormd top` needs a terminal for its input and output")
            .hint("`denormd status` prints the same figures once; `watch -n 2 denormd status` repeats it"));
    }
    Ok(())
}

fn unusable(error: &std::io::Error) -> Error {
    Error::new(Kind::Machine, format!("the terminal cannot be used: {error}"))
}

/// Asks the daemon again and again, until nobody receives the answers.
async fn poll(daemon: Daemon, answers: mpsc::Sender<Result<Status>>) {
    loop {
        tokio::time::sleep(EVERY).await;
        let answer = ask(&daemon).await;
        if answers.send(answer).await.is_err() {
            return;
        }
    }
}

async fn ask(daemon: &Daemon) -> Result<Status> {
    let answer = client::get(daemon.clone(), "/v1/status", TIMEOUT).await?;
    if !answer.ok {
        let why = String::from_utf8_lossy(&answer.body).trim().to_owned();
        return Err(Error::new(Kind::Unavailable, format!("the daemon answers HTTP {}: {why}", answer.code)));
    }
    answer.json()
}

/// Draws the model after each change, until the user or a signal ends it.
async fn follow(
    terminal: &mut DefaultTerminal,
    model: &mut Model,
    mut answers: mpsc::Receiver<Result<Status>>,
) -> std::io::Result<()> {
    let mut keys = EventStream::new();
    let mut ended = std::pin::pin!(terminated());
    let mut second = tokio::time::interval(EVERY);
    second.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        model.now = wall_millis();
        terminal.draw(|frame| view::draw(frame, model))?;
        tokio::select! {
            Some(answer) = answers.recv() => model.take(answer, wall_millis()),
            // A terminal that is gone ends the view.
            event = keys.next() => match event.transpose()? {
                Some(event) if model.event(&event) == Next::Draw => {}
                _ => return Ok(()),
            },
            () = &mut ended => return Ok(()),
            _ = second.tick() => {}
        }
    }
}

/// Waits for SIGTERM or SIGHUP, so that the terminal is restored before the process ends.
#[cfg(unix)]
async fn terminated() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut hangup)) = (signal(SignalKind::terminate()), signal(SignalKind::hangup())) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
}

#[cfg(not(unix))]
async fn terminated() {
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_terminal_suits_and_the_refusal_names_the_alternative() {
        let refused = |output, is_terminal| suits(output, is_terminal).unwrap_err();
        let error = refused(Output::Text, false);
        assert_eq!(Failure::from(error).status(), 2);
        assert!(refused(Output::Text, false).to_string().contains("watch -n 2 denormd status"));
        assert!(refused(Output::Json, true).to_string().contains("denormd status --output json"));
    }
}
