//! The content of the screen: the last answer of the daemon, and the choices of the user. Pure: times are given.

use std::collections::{BTreeMap, VecDeque};

use crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

pub use super::order::Sort;
use super::{rule, theme::Theme};
use crate::status::{BEHIND, Rule, Status};
use denormd_model::distribution::ratio;
use denormd_mongo::error::{Error, Result};

/// Time without an answer, in milliseconds, after which the state counts as unknown though no poll has failed yet.
const SILENCE: i64 = 5000;
/// Time over which the rates of rules are taken, in milliseconds.
const SPAN: i64 = 10_000;
/// Rules that PageUp and PageDown pass.
const PAGE: usize = 10;
/// The width by which the end of the details is estimated.
const WIDTH: usize = 80;

/// The reaction to an event of the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Another frame.
    Draw,
    /// The end.
    Quit,
}

/// The part of the screen below the headline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Page {
    /// The causes and the table of rules.
    Rules,
    /// The details of the selected rule, from this line on.
    Details(usize),
    /// The keys.
    Help,
}

/// The state of the view.
#[derive(Debug)]
pub struct Model {
    /// The address of the daemon.
    pub address: String,
    /// The time of the frame, in milliseconds since 1970, by the clock of this machine like all times here.
    pub now: i64,
    /// The last answer, and its time.
    answer: Option<(Status, i64)>,
    /// The start of the view.
    started: i64,
    /// The error of the last poll, if it failed.
    failure: Option<Error>,
    rates: Rates,
    selected: Option<String>,
    /// The order of the rules.
    pub sort: Sort,
    /// The page that is shown.
    pub page: Page,
    /// The styles.
    pub theme: Theme,
}

/// The reason why the state is unknown, and the time since when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown {
    /// The time of the last answer, or the start of the view if there was none.
    pub since: i64,
    /// The reason.
    pub reason: String,
    /// The suggested remedy, if there is one.
    pub hint: Option<String>,
}

impl Model {
    /// A view of the daemon at `address`, before its first answer.
    #[must_use]
    pub fn new(address: String, theme: Theme, now: i64) -> Self {
        Self {
            address,
            now,
            answer: None,
            started: now,
            failure: None,
            rates: Rates::default(),
            selected: None,
            sort: Sort::Attention,
            page: Page::Rules,
            theme,
        }
    }

    /// Takes an answer that came at `now`. A failure leaves the last state, which is unknown from then on.
    pub fn take(&mut self, answer: Result<Status>, now: i64) {
        self.now = now;
        match answer {
            Ok(status) => {
                self.rates.add(&status);
                self.answer = Some((status, now));
                self.failure = None;
            }
            Err(error) => self.failure = Some(error),
        }
    }

    /// The last status, however old.
    #[must_use]
    pub fn status(&self) -> Option<&Status> {
        self.answer.as_ref().map(|(status, _)| status)
    }

    /// The reason why the state is not known now; None while the daemon answers.
    #[must_use]
    pub fn unknown(&self) -> Option<Unknown> {
        let since = self.answer.as_ref().map_or(self.started, |(_, at)| *at);
        let (reason, hint) = match &self.failure {
            Some(error) => (error.message.clone(), error.hint.clone()),
            None if self.now - since >= SILENCE => (format!("no answer from denormd at {} yet", self.address), None),
            None => return None,
        };
        Some(Unknown { since, reason, hint })
    }

    /// Targets changed per second of a rule. None while that is not known.
    #[must_use]
    pub fn rate(&self, rule: &str) -> Option<f64> {
        if self.unknown().is_some() || self.status().is_none_or(is_old) {
            return None;
        }
        self.rates.of(rule)
    }

    /// The rules in their order.
    #[must_use]
    pub fn rules(&self) -> Vec<&Rule> {
        self.status().map(|status| self.sort.apply(&status.rules)).unwrap_or_default()
    }

    /// The place of the selected rule: the first one until the user selects another.
    #[must_use]
    pub fn selected(&self) -> usize {
        let name = self.selected.as_ref();
        name.and_then(|name| self.rules().iter().position(|rule| rule.name == *name)).unwrap_or_default()
    }

    /// Applies an event of the terminal.
    pub fn event(&mut self, event: &Event) -> Next {
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => self.key(*key),
            _ => Next::Draw,
        }
    }

    fn key(&mut self, key: KeyEvent) -> Next {
        let ctrl = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if ctrl => return Next::Quit,
            KeyCode::Char('q') => return Next::Quit,
            KeyCode::Esc if self.page == Page::Rules => return Next::Quit,
            KeyCode::Esc => self.page = Page::Rules,
            KeyCode::Char('?' | 'h') => self.page = if self.page == Page::Help { Page::Rules } else { Page::Help },
            KeyCode::Enter | KeyCode::Char('d') => {
                self.page = if matches!(self.page, Page::Details(_)) { Page::Rules } else { Page::Details(0) };
            }
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Up | KeyCode::Char('k') => self.step(|at, _| at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.step(|at, last| (at + 1).min(last)),
            KeyCode::Home | KeyCode::Char('g') => self.step(|_, _| 0),
            KeyCode::End | KeyCode::Char('G') => self.step(|_, last| last),
            KeyCode::PageUp => self.page_by(|at, _| at.saturating_sub(PAGE)),
            KeyCode::PageDown => self.page_by(|at, last| (at + PAGE).min(last)),
            _ => {}
        }
        Next::Draw
    }

    /// Selects another rule, given the place of the selected and of the last one.
    fn step(&mut self, to: impl Fn(usize, usize) -> usize) {
        let rules = self.rules();
        let at = to(self.selected(), rules.len().saturating_sub(1));
        let name = rules.get(at).map(|rule| rule.name.clone());
        self.selected = name.or(self.selected.take());
        if let Page::Details(from) = &mut self.page {
            *from = 0;
        }
    }

    /// The details of a rule as lines.
    pub(super) fn details(&self, status: &Status, rule: &Rule, columns: usize) -> Vec<String> {
        rule::details(status, rule, self.unknown().is_some(), self.rate(&rule.name), columns)
    }

    /// Scrolls the details, or selects a rule further away.
    fn page_by(&mut self, to: impl Fn(usize, usize) -> usize) {
        match self.page {
            Page::Details(from) => {
                let rules = self.rules();
                let selected = self.status().zip(rules.get(self.selected()));
                let lines = selected.map(|(status, rule)| self.details(status, rule, WIDTH).len());
                self.page = Page::Details(to(from, lines.unwrap_or_default()));
            }
            Page::Rules | Page::Help => self.step(to),
        }
    }
}

/// True for figures of a leader that has not been heard for a while.
pub(super) fn is_old(status: &Status) -> bool {
    status.heard_seconds.is_some_and(|heard| heard >= BEHIND)
}

/// The counts of changed targets in the last answers, oldest first.
#[derive(Debug, Default)]
struct Rates {
    started: i64,
    samples: VecDeque<(i64, BTreeMap<String, u64>)>,
}

impl Rates {
    fn add(&mut self, status: &Status) {
        if self.started != status.started {
            self.started = status.started;
            self.samples.clear();
        }
        let counts: BTreeMap<String, u64> =
            status.rules.iter().map(|rule| (rule.name.clone(), rule.targets_changed)).collect();
        // A count that has become smaller is another leader's.
        let restarted = |(_, old): &(i64, BTreeMap<String, u64>)| {
            old.iter().any(|(rule, old)| counts.get(rule).is_some_and(|new| new < old))
        };
        if self.samples.back().is_some_and(restarted) {
            self.samples.clear();
        }
        self.samples.push_back((status.now, counts));
        while self.samples.front().is_some_and(|(at, _)| status.now - at > SPAN) {
            self.samples.pop_front();
        }
    }

    fn of(&self, rule: &str) -> Option<f64> {
        let count = |sample: &(i64, BTreeMap<String, u64>)| Some((sample.0, *sample.1.get(rule)?));
        let (from, before) = self.samples.iter().find_map(count)?;
        let (to, after) = count(self.samples.back()?)?;
        let millis = u64::try_from(to - from).ok().filter(|millis| *millis > 0)?;
        Some(ratio(after.saturating_sub(before) * 1000, millis))
    }
}
