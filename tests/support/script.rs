//! The scripts in `tests/` that find what a test needs beside Rust, or fetch it once.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// The path that `tests/<name>` prints. None, with the reason printed, if there is none to be had.
pub fn found_by(name: &str) -> Option<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    let found = Command::new("python3").arg(script).output().unwrap();
    if found.status.success() {
        return Some(PathBuf::from(String::from_utf8(found.stdout).unwrap().trim()));
    }
    println!("skipped: {}", String::from_utf8_lossy(&found.stderr));
    None
}
