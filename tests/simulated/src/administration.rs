//! Commands about the server, databases, collections and indexes.

use bson::{Bson, Document, doc};
use denormd_mql::matches;

use crate::{
    oplog::Change,
    read::is_set,
    replies::{Failure, Result},
    state::{State, check_options, target},
};

/// The version that the model follows.
const VERSION: [i32; 4] = [6, 0, 5, 0];

impl State {
    pub fn administer(&mut self, name: &str, argument: &Bson, database: &str, command: &Document) -> Result<Document> {
        Ok(match name {
            "ping" | "endSessions" | "refreshSessions" | "killSessions" | "getLog" => doc! {},
            "buildInfo" | "buildinfo" => doc! {
                "version": "6.0.5", "versionArray": VERSION.to_vec(), "gitVersion": "simulated", "modules": [],
                "allocator": "system", "bits": 64, "debug": false, "maxBsonObjectSize": 16 << 20,
            },
            "connectionStatus" => doc! {
                "authInfo": {"authenticatedUsers": [], "authenticatedUserRoles": [], "authenticatedUserPrivileges": []},
            },
            "appendOplogNote" => {
                self.noop();
                doc! {}
            }
            "collStats" if target(database, command)? == "local.oplog.rs" => {
                let size = i64::try_from(self.oplog.len()).unwrap_or(i64::MAX).saturating_mul(200);
                doc! {"ns": "local.oplog.rs", "size": size, "maxSize": 1_i64 << 30, "capped": true}
            }
            "listDatabases" => self.list_databases(command)?,
            "listCollections" => self.list_collections(database, command)?,
            "listIndexes" => {
                let namespace = target(database, command)?;
                let Some(meta) = self.collections.get(&namespace) else {
                    return Err(Failure::new(26, format!("ns does not exist: {namespace}")));
                };
                doc! {"cursor": {"firstBatch": meta.indexes.clone(), "id": 0_i64, "ns": namespace}}
            }
            "create" => {
                // A capped collection keeps its oldest documents here.
                let known = ["changeStreamPreAndPostImages", "capped", "size", "max"];
                check_options("create", command, &known)?;
                let namespace = target(database, command)?;
                if self.collections.contains_key(&namespace) {
                    return Err(Failure::new(48, format!("Collection {namespace} already exists.")));
                }
                let given = command.iter().filter(|(name, _)| known.contains(&name.as_str()));
                self.create(&namespace, given.map(|(name, value)| (name.clone(), value.clone())).collect());
                doc! {}
            }
            "collMod" => {
                check_options("collMod", command, &["changeStreamPreAndPostImages"])?;
                let namespace = target(database, command)?;
                let Some(meta) = self.collections.get_mut(&namespace) else {
                    return Err(Failure::new(26, "ns does not exist"));
                };
                if let Ok(images) = command.get_document("changeStreamPreAndPostImages") {
                    if is_set(images, "enabled") {
                        meta.options.insert("changeStreamPreAndPostImages", images.clone());
                    } else {
                        meta.options.remove("changeStreamPreAndPostImages");
                    }
                }
                self.emit(&namespace, Change::Modify);
                doc! {}
            }
            "createIndexes" => self.create_indexes(database, command)?,
            "dropIndexes" => self.drop_indexes(database, command)?,
            "drop" => {
                let namespace = target(database, command)?;
                if self.collections.remove(&namespace).is_none() {
                    return Err(Failure::new(26, "ns not found"));
                }
                self.data.remove(&namespace);
                self.emit(&namespace, Change::Drop);
                doc! {"ns": namespace, "nIndexesWas": 1}
            }
            "dropDatabase" => {
                let inside = |namespace: &&String| namespace.split_once('.').is_some_and(|(name, _)| name == database);
                let names: Vec<String> = self.collections.keys().filter(inside).cloned().collect();
                for namespace in &names {
                    self.collections.remove(namespace);
                    self.data.remove(namespace);
                    self.emit(namespace, Change::Drop);
                }
                if !names.is_empty() {
                    self.emit(&format!("{database}."), Change::DropDatabase);
                }
                doc! {"dropped": database}
            }
            "renameCollection" => self.rename(argument, command)?,
            name => return Err(Failure::unknown(format_args!("the command `{name}`"))),
        })
    }

    fn list_databases(&self, command: &Document) -> Result<Document> {
        check_options("listDatabases", command, &["nameOnly", "authorizedDatabases", "filter"])?;
        let filter = command.get_document("filter").cloned().unwrap_or_default();
        let mut names: Vec<&str> = self.collections.keys().filter_map(|ns| Some(ns.split_once('.')?.0)).collect();
        names.dedup();
        let mut databases = Vec::new();
        for name in ["admin", "config", "local"].into_iter().chain(names) {
            let one = doc! {"name": name, "sizeOnDisk": 8192_i64, "empty": false};
            if matches(&filter, &one)? {
                databases.push(one);
            }
        }
        Ok(doc! {"databases": databases, "totalSize": 8192_i64})
    }

    fn list_collections(&self, database: &str, command: &Document) -> Result<Document> {
        check_options("listCollections", command, &["filter", "cursor", "nameOnly", "authorizedCollections"])?;
        let filter = command.get_document("filter").cloned().unwrap_or_default();
        let name_only = is_set(command, "nameOnly");
        let mut found = Vec::new();
        for (namespace, meta) in &self.collections {
            let Some((of, name)) = namespace.split_once('.') else { continue };
            if of != database {
                continue;
            }
            let mut one = doc! {"name": name, "type": "collection"};
            if !name_only {
                let info = doc! {"readOnly": false, "uuid": meta.uuid.clone()};
                let index = doc! {"v": 2, "key": {"_id": 1}, "name": "_id_"};
                one.extend(doc! {"options": meta.options.clone(), "info": info, "idIndex": index});
            }
            if matches(&filter, &one)? {
                found.push(one);
            }
        }
        Ok(doc! {"cursor": {"firstBatch": found, "id": 0_i64, "ns": format!("{database}.$cmd.listCollections")}})
    }

    fn create_indexes(&mut self, database: &str, command: &Document) -> Result<Document> {
        check_options("createIndexes", command, &["indexes", "commitQuorum"])?;
        let namespace = target(database, command)?;
        self.create(&namespace, Document::new());
        for index in command.get_array("indexes").into_iter().flatten().filter_map(Bson::as_document) {
            let known = ["key", "name", "v", "unique", "sparse", "partialFilterExpression", "collation", "background"];
            check_options("indexes", index, &known)?;
            let mut index = index.clone();
            if !index.contains_key("name") {
                let parts = index.get_document("key").into_iter().flatten().map(|(path, way)| format!("{path}_{way}"));
                let name = parts.collect::<Vec<_>>().join("_");
                index.insert("name", name);
            }
            index.remove("collation");
            index.insert("v", 2);
            if let Some(meta) = self.collections.get_mut(&namespace)
                && !meta.indexes.iter().any(|known| known.get("key") == index.get("key"))
            {
                meta.indexes.push(index);
                self.emit(&namespace, Change::Modify);
            }
        }
        Ok(doc! {})
    }

    fn drop_indexes(&mut self, database: &str, command: &Document) -> Result<Document> {
        check_options("dropIndexes", command, &["index"])?;
        let namespace = target(database, command)?;
        let Some(meta) = self.collections.get_mut(&namespace) else { return Err(Failure::new(26, "ns not found")) };
        let goes = |index: &Document| match command.get("index") {
            Some(Bson::String(name)) if name == "*" => index.get_str("name").is_ok_and(|text| text != "_id_"),
            Some(Bson::String(name)) => index.get_str("name").is_ok_and(|text| text == name.as_str()),
            Some(Bson::Document(key)) => index.get_document("key").is_ok_and(|other| other == key),
            _ => false,
        };
        meta.indexes.retain(|index| !goes(index));
        self.emit(&namespace, Change::Modify);
        Ok(doc! {})
    }

    fn rename(&mut self, from: &Bson, command: &Document) -> Result<Document> {
        check_options("renameCollection", command, &["to", "dropTarget"])?;
        let (Some(from), Ok(to)) = (from.as_str(), command.get_str("to")) else {
            return Err(Failure::new(9, "a collection's name is a string"));
        };
        if !self.collections.contains_key(from) {
            return Err(Failure::new(26, format!("Source collection {from} does not exist")));
        }
        if from == to {
            return Err(Failure::new(20, "Can't rename a collection to itself"));
        }
        let replaced = self.collections.contains_key(to);
        if replaced && !is_set(command, "dropTarget") {
            return Err(Failure::new(48, "target namespace exists"));
        }
        if let Some(meta) = self.collections.remove(from) {
            self.collections.insert(to.to_owned(), meta);
        }
        let rows = self.data.remove(from).unwrap_or_default();
        self.data.insert(to.to_owned(), rows);
        let (database, collection) = to.split_once('.').unwrap_or((to, ""));
        let to = (database.to_owned(), collection.to_owned());
        self.emit(from, Change::Rename { to });
        Ok(doc! {})
    }
}
