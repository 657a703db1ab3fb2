//! Commands about the program itself: `schema`, `config`, `completions`, `man`.

use std::path::Path;

use crate::{
    cli::{Cli, Output},
    commands::{Failure, print, print_json},
};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::{Loaded, schema};

/// Prints the config's JSON Schema, or its reference in Markdown.
pub fn schema(reference: bool) {
    if reference {
        print(&schema::reference());
    } else {
        print_json(&schema::schema());
    }
}

/// Prints every setting in force with its origin. Passwords are hidden.
pub fn config(loaded: &Loaded, output: Output) {
    let effective = loaded.effective();
    match output {
        Output::Json => print_json(&effective),
        Output::Text => {
            let width = |text: fn(&denormd_rules::config::Effective) -> &str| {
                effective.iter().map(|it| text(it).chars().count()).max().unwrap_or_default()
            };
            let (setting, value) = (width(|it| &it.setting), width(|it| &it.value));
            for it in &effective {
                print(&format!("{:setting$}  {:value$}  # {}\n", it.setting, it.value, it.from));
            }
        }
    }
}

/// Prints the completion script of a shell.
pub fn completions(shell: clap_complete::Shell) {
    let mut out = Vec::new();
    clap_complete::generate(shell, &mut Cli::documented(), "denormd", &mut out);
    print(&String::from_utf8_lossy(&out));
}

/// Writes the man pages into a folder, or prints the page of `denormd` itself.
pub fn man(folder: Option<&Path>) -> Result<(), Failure> {
    let unwritable =
        |error: std::io::Error| Error::new(Kind::Machine, format!("the man pages cannot be written: {error}"));
    match folder {
        Some(folder) => {
            std::fs::create_dir_all(folder).map_err(unwritable)?;
            clap_mangen::generate_to(Cli::documented(), folder).map_err(unwritable)?;
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::documented()).render(&mut page).map_err(unwritable)?;
            print(&String::from_utf8_lossy(&page));
        }
    }
    Ok(())
}
