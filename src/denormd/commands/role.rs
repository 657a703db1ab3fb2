//! `denormd role`

use bson::{Bson, Document, doc};

use crate::{
    cli::Output,
    commands::{Failure, compile, print_as},
};
use denormd_rules::{
    config::Loaded,
    plan::privileges::{OPLOG, Privilege, needed, needed_to_apply},
};

/// Prints the least role that these rules need. Asks no server.
pub async fn role(loaded: &Loaded, output: Output, name: &str, apply: bool, oplog: bool) -> Result<(), Failure> {
    let plan = compile(loaded).await?;
    let mut privileges = needed(&plan, &loaded.config.state.database);
    if !oplog {
        privileges.retain(|privilege| {
            (privilege.resource.database.as_str(), privilege.resource.collection.as_str()) != OPLOG
        });
    }
    if apply {
        privileges.extend(needed_to_apply(&plan));
    }
    print_as(output, || text(name, &privileges), || Bson::Document(command(name, &privileges)).into_relaxed_extjson());
    Ok(())
}

/// The command, to be run against `admin`: a role there may name several databases.
#[must_use]
pub fn command(name: &str, privileges: &[Privilege]) -> Document {
    let privileges: Vec<Document> = privileges.iter().map(Privilege::document).collect();
    doc! {"createRole": name, "privileges": privileges, "roles": []}
}

fn text(name: &str, privileges: &[Privilege]) -> String {
    let line = |(nth, privilege): (usize, &Privilege)| {
        let comma = if nth + 1 < privileges.len() { "," } else { "" };
        let purposes: Vec<&str> = privilege.purposes.iter().map(String::as_str).collect();
        format!("    // {}\n    {}{comma}\n", purposes.join(", "), privilege.shell())
    };
    let lines: String = privileges.iter().enumerate().map(line).collect();
    format!(
        "db.getSiblingDB(\"admin\").createRole({{\n  role: {name:?},\n  privileges: [\n{lines}  ],\n  roles: []\n}})\n\
         db.getSiblingDB(\"admin\").createUser({{ user: {name:?}, pwd: passwordPrompt(), roles: [{name:?}] }})\n",
    )
}
