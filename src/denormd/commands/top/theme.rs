//! Colours, or without them bold and dim text. What a colour says, a word or a mark beside it says too.

use std::io::IsTerminal;

use ratatui::style::{Color, Modifier, Style};

use super::order::Concern;
use crate::{commands::terminal::has_colour, status::Level};

/// The styles of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Theme {
    colour: bool,
}

impl Theme {
    /// Text without colours.
    pub const PLAIN: Self = Self { colour: false };
    /// The 16 colours that every terminal has, in its own palette.
    pub const COLOURED: Self = Self { colour: true };

    /// The theme for a stream: plain if NO_COLOR is set.
    #[must_use]
    pub fn of(stream: &impl IsTerminal) -> Self {
        if has_colour(stream) { Self::COLOURED } else { Self::PLAIN }
    }

    fn in_colour(self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    /// The headline.
    pub(super) fn headline(self, level: Level) -> Style {
        let colour = match level {
            Level::Ok => Color::Green,
            Level::Notice => Color::Blue,
            Level::Behind => Color::Yellow,
            Level::Critical => Color::Red,
        };
        self.in_colour(colour).add_modifier(Modifier::BOLD)
    }

    /// The band that says that nothing is known.
    pub(super) fn unknown(self) -> Style {
        self.in_colour(Color::Red).add_modifier(Modifier::BOLD | Modifier::REVERSED)
    }

    /// The mark of a cause.
    pub(super) fn cause(self, is_severe: bool) -> Style {
        if is_severe { self.in_colour(Color::Red).add_modifier(Modifier::BOLD) } else { self.in_colour(Color::Yellow) }
    }

    /// The row of a rule.
    pub(super) fn row(self, concern: Concern) -> Style {
        match concern {
            Concern::Stopped => self.in_colour(Color::Red).add_modifier(Modifier::BOLD),
            Concern::Late | Concern::DeadLetters => self.in_colour(Color::Yellow),
            Concern::Backfill => self.in_colour(Color::Blue),
            Concern::None => Style::new(),
        }
    }

    /// The selected row. Reversed, so that it is seen without colours.
    pub(super) fn selected() -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// Headings.
    pub(super) fn heading() -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// Labels, and figures that are old.
    pub(super) fn soft() -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }
}
