//! `denormd role`

use bson::{Bson, Document, doc};

use crate::{
    cli::{Output, RoleOptions},
    commands::{Failure, compile, print_as},
};
use denormd_rules::{
    config::Loaded,
    plan::privileges::{OPLOG, Privilege, needed, needed_to_apply},
};

/// Prints the least role that these rules need. Asks no server.
pub async fn role(loaded: &Loaded, output: Output, options: &RoleOptions) -> Result<(), Failure> {
    let plan = compile(loaded).await?;
    let mut privileges = needed(&plan, &loaded.config.state.database);
    if options.without_oplog {
        privileges.retain(|privilege| {
            (privilege.resource.database.as_str(), privilege.resource.collection.as_str()) != OPLOG
        });
    }
    if options.with_apply {
        privileges.extend(needed_to_apply(&plan));
    }
    print_as(
        output,
        || text(options, &privileges),
        || Bson::Document(command(options, &privileges)).into_relaxed_extjson(),
    );
    Ok(())
}

/// The command, to be run against `admin`: a role there may name several databases.
fn command(options: &RoleOptions, privileges: &[Privilege]) -> Document {
    let privileges: Vec<Document> = privileges.iter().map(Privilege::document).collect();
    let verb = if options.update { "updateRole" } else { "createRole" };
    doc! {verb: &options.name, "privileges": privileges, "roles": []}
}

fn text(options: &RoleOptions, privileges: &[Privilege]) -> String {
    let line = |(nth, privilege): (usize, &Privilege)| {
        let comma = if nth + 1 < privileges.len() { "," } else { "" };
        let purposes: Vec<&str> = privilege.purposes.iter().map(String::as_str).collect();
        format!("    // {}\n    {}{comma}\n", purposes.join(", "), privilege.shell())
    };
    let lines: String = privileges.iter().enumerate().map(line).collect();
    let name = &options.name;
    let (role, user) = if options.update {
        (format!("updateRole({name:?}, {{"), String::new())
    } else {
        let user = format!("{{ user: {name:?}, pwd: passwordPrompt(), roles: [{name:?}] }}");
        (format!("createRole({{\n  role: {name:?},"), format!("db.getSiblingDB(\"admin\").createUser({user})\n"))
    };
    format!("db.getSiblingDB(\"admin\").{role}\n  privileges: [\n{lines}  ],\n  roles: []\n}})\n{user}")
}
