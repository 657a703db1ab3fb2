//! The commit that `--version` and `denormd_build_info` name: `DENORMD_COMMIT`, else what git says.

use std::{env, process::Command};

fn main() {
    println!("cargo::rerun-if-env-changed=DENORMD_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let given = env::var("DENORMD_COMMIT").ok().filter(|commit| !commit.is_empty());
    // A debug build does not ask git: it would be linked again after every commit.
    let release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = given.or_else(|| release.then(from_git).flatten()).unwrap_or_default();
    let commit: String = commit.trim().chars().take(12).collect();
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let whole = if commit.is_empty() { version } else { format!("{version} ({commit})") };
    println!("cargo::rustc-env=DENORMD_COMMIT={commit}");
    println!("cargo::rustc-env=DENORMD_VERSION={whole}");
}

fn from_git() -> Option<String> {
    // Every commit and every checkout adds a line to it.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    println!("cargo::rerun-if-changed={}", log.trim());
    git(&["rev-parse", "HEAD"])
}

/// What git prints; nothing where there is no git or no repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
