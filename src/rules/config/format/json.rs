//! JSON with places. `serde_json` judges the text; once it accepts, tokens are told apart by their first byte, and this
//! walk only has to remember where they stand (which `serde_json` does not say).

use serde::de::IgnoredAny;

use crate::config::tree::{Entry, Fault, MAX_DEPTH, Node, Span, Value};

pub(super) fn parse(text: &str) -> (Option<Node>, Vec<Fault>) {
    if let Err(error) = serde_json::from_str::<IgnoredAny>(text) {
        return (None, vec![syntax_fault(text, &error)]);
    }
    let mut walk = Walk { text, at: 0, faults: Vec::new() };
    match walk.node(0) {
        Ok(node) => (Some(node), walk.faults),
        Err(fault) => (None, vec![fault]),
    }
}

fn syntax_fault(text: &str, error: &serde_json::Error) -> Fault {
    let line = text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum::<usize>();
    let at = (line + error.column().saturating_sub(1)).min(text.trim_end().len());
    Fault::new(at..at + 1, message(error))
}

fn message(error: &serde_json::Error) -> String {
    let message = error.to_string();
    format!("this is not JSON: {}", message.split(" at line ").next().unwrap_or(&message))
}

struct Walk<'a> {
    text: &'a str,
    at: usize,
    faults: Vec<Fault>,
}

impl Walk<'_> {
    fn node(&mut self, depth: usize) -> Result<Node, Fault> {
        self.skip_blanks();
        let start = self.at;
        if depth > MAX_DEPTH {
            return Err(Fault::too_deep(start..start + 1));
        }
        let value = match self.peek() {
            Some(b'{') => Value::Mapping(self.mapping(depth)?),
            Some(b'[') => Value::Sequence(self.sequence(depth)?),
            Some(b'"') => Value::String(self.string()?.0),
            _ => self.literal()?,
        };
        Ok(Node::new(value, start..self.at))
    }

    fn mapping(&mut self, depth: usize) -> Result<Vec<Entry>, Fault> {
        let mut entries: Vec<Entry> = Vec::new();
        while self.more(b'}') {
            let (key, key_span) = self.string()?;
            self.skip_blanks();
            self.at += 1; // the colon
            let node = self.node(depth + 1)?;
            if let Some(first) = entries.iter().find(|entry| entry.key == key) {
                self.faults.push(Fault::duplicate(&key, first.key_span.clone(), key_span));
            } else {
                entries.push(Entry { key, key_span, node });
            }
        }
        Ok(entries)
    }

    fn sequence(&mut self, depth: usize) -> Result<Vec<Node>, Fault> {
        let mut items = Vec::new();
        while self.more(b']') {
            items.push(self.node(depth + 1)?);
        }
        Ok(items)
    }

    /// Past the opening bracket or the comma before the next element, or past the closing bracket.
    fn more(&mut self, close: u8) -> bool {
        self.skip_blanks();
        self.at += 1;
        if self.text.as_bytes().get(self.at - 1) == Some(&close) {
            return false;
        }
        self.skip_blanks();
        match self.peek() {
            None => false,
            Some(byte) if byte == close => {
                self.at += 1;
                false
            }
            Some(_) => true,
        }
    }

    fn string(&mut self) -> Result<(String, Span), Fault> {
        let start = self.at;
        self.at += 1;
        while let Some(byte) = self.peek() {
            self.at += if byte == b'\\' { 2 } else { 1 };
            if byte == b'"' {
                break;
            }
        }
        let span = start..self.at;
        Ok((self.decode(span.clone())?, span))
    }

    fn literal(&mut self) -> Result<Value, Fault> {
        let start = self.at;
        while self.peek().is_some_and(|byte| !b",]} \t\r\n".contains(&byte)) {
            self.at += 1;
        }
        let span = start..self.at;
        match self.text.get(span.clone()).unwrap_or_default() {
            "null" => Ok(Value::Null),
            "true" => Ok(Value::Bool(true)),
            "false" => Ok(Value::Bool(false)),
            number if number.contains(['.', 'e', 'E']) => Ok(Value::Float(self.decode(span)?)),
            number => Ok(Value::Int(number.parse().unwrap_or_else(|_| {
                self.faults.push(Fault::number_too_large(span));
                0
            }))),
        }
    }

    fn decode<T: serde::de::DeserializeOwned>(&self, span: Span) -> Result<T, Fault> {
        let token = self.text.get(span.clone()).unwrap_or_default();
        serde_json::from_str(token).map_err(|error| Fault::new(span, message(&error)))
    }

    fn skip_blanks(&mut self) {
        while self.peek().is_some_and(|byte| b" \t\r\n".contains(&byte)) {
            self.at += 1;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }
}
