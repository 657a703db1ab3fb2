//! Random rules over their own collections, and random histories of these collections.

mod beside;
mod created;
mod crowd;
mod draw;
mod odd;
mod parts;
mod shape;
mod target;
mod tree;

use std::collections::BTreeSet;

use bson::{Bson, Document, doc};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

use crate::{Op, Oracle, World};
pub use beside::TOUCHED;
use crowd::Crowding;
use odd::ECHOED;
pub use odd::{NOT_UTF8, Odd};
use shape::Shape;

/// The options of a [`Generator`].
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools)]
pub struct Options {
    /// Prefix of all the world's collections, so that hundreds of worlds share a database.
    pub prefix: String,
    /// The database of the collections, for DBRefs that name it.
    pub database: String,
    /// The most rules (at least one is drawn).
    pub max_rules: usize,
    /// Approximate number of documents that each collection starts with.
    pub documents: usize,
    /// `copy` rules. Also drawn if no kind is chosen.
    pub copy: bool,
    /// `collect` rules.
    pub collect: bool,
    /// `aggregate` rules.
    pub aggregate: bool,
    /// One rule's target may be another's source, and a collection its own; rules read fields that others own.
    pub chains: bool,
    /// `on_missing: remove` and `delete`.
    pub destroy: bool,
    /// `once: true`.
    pub once: bool,
    /// The application also fills the values of `once` rules.
    pub fills_once: bool,
    /// A composite match with one entry outside the array of the others.
    pub mixed_composite: bool,
    /// Scalars in place of arrays, and an owned path whose parent is not a document.
    pub wrong_shapes: bool,
    /// Expressions that fail on some values: dead letters.
    pub failing: bool,
    /// Recursive rules, over a collection of their own.
    pub trees: bool,
    /// In some worlds all rules write the same targets, most of them with `touch`.
    pub shared: bool,
    /// Users write owned paths; the rules get `guard: watch` or `audit`.
    pub write_owned: bool,
    /// In some worlds, `_id`s are documents, and rules match by a field of them.
    pub id_parts: bool,
    /// Additional kinds of a world.
    pub odd: Vec<Odd>,
}

impl Options {
    /// Only copy rules, without removals.
    #[must_use]
    pub fn new(prefix: impl Into<String>) -> Self {
        Self {
            prefix: prefix.into(),
            database: "test".to_owned(),
            max_rules: 3,
            documents: 5,
            copy: true,
            collect: false,
            aggregate: false,
            chains: false,
            destroy: false,
            once: true,
            fills_once: true,
            mixed_composite: false,
            wrong_shapes: true,
            failing: false,
            trees: false,
            shared: false,
            write_owned: false,
            id_parts: false,
            odd: Vec::new(),
        }
    }

    /// Every kind of rule, chained.
    #[must_use]
    pub fn everything(prefix: impl Into<String>) -> Self {
        Self { collect: true, aggregate: true, chains: true, trees: true, ..Self::new(prefix) }
    }
}

/// Draws one world: its rules, its first documents, its history. The same seed and options draw the same world.
///
/// ```
/// use denormd_oracle::{Generator, Oracle, World, differences};
///
/// let mut generator = Generator::new(7);
/// let rules = generator.rules();
/// let oracle = Oracle::new(&rules, generator.database()).unwrap();
/// // on a server: generator.collections(), generator.pre_images(), generator.indexes(), then start denormd
/// let mut world = World::new();
/// for op in generator.initial() {
///     // A refused operation (duplicate key, $push to a scalar) is part of the history: ignore it.
///     op.apply(&mut world).ok();
/// }
/// for _ in 0..100 {
///     generator.op().apply(&mut world).ok();
/// }
/// // wait until denormd is idle, read the collections back, and:
/// let expectation = oracle.expected(&world).unwrap();
/// assert!(differences(&expectation, &expectation.world).is_empty());
/// ```
#[derive(Debug)]
pub struct Generator {
    rng: StdRng,
    /// Draws `let`, apart from everything else: other draws of a seed stay as they were.
    variables: StdRng,
    /// Draws `$$target`, in the same way.
    targets: StdRng,
    /// Draws trees, in the same way.
    trees: StdRng,
    /// The collection of the tree, and the field that holds a document's parent.
    tree: Option<(String, String)>,
    /// Draws rules that create documents, in the same way.
    created: StdRng,
    /// The `match` of these rules.
    created_key: Option<Document>,
    /// The paths that they own.
    created_paths: Vec<String>,
    /// The source collections of these rules.
    created_sources: BTreeSet<String>,
    /// Draws `touch` and values at its paths, paths in elements and beside the array, and arrays on both sides, in the
    /// same way.
    beside: StdRng,
    /// Draws worlds whose rules write the same targets, in the same way.
    shared: StdRng,
    /// True if this is such a world.
    is_shared: bool,
    /// Draws rare values, in the same way.
    rare: StdRng,
    /// Draws crowded worlds and what is more frequent in them, in the same way.
    crowd: StdRng,
    crowding: Crowding,
    /// Draws the frequencies of this world, in the same way.
    frequencies: StdRng,
    /// Share of operations on known documents that change the first document of the collection.
    hot: f64,
    /// Share of MinKey, MaxKey and null among the keys of a world with [`Odd::EdgeIds`].
    edges: f64,
    /// Share of operations that write owned fields, in addition to those among the updates.
    drift: f64,
    /// Share of operations that take the key of a created document from one of its sources.
    leaving: f64,
    /// Number of different `_id`s in the tree.
    tree_ids: i32,
    /// The shape of all references in the collection that echoes change, in worlds whose stream may leave out updates.
    echoed: Option<Shape>,
    /// Numbers of this world whose sum depends on their order.
    numbers: Vec<Bson>,
    /// True if codes are so long that documents with such an `_id` may share statements.
    has_long_codes: bool,
    options: Options,
    collections: Vec<String>,
    scenarios: Vec<Scenario>,
    rules: Vec<Document>,
    /// The documents as the users wrote them: without denormd's fields.
    model: World,
    /// Deleted ids, to be inserted again.
    deleted: Vec<(String, Bson)>,
    /// The document that the last operation has inserted or changed: its collection and its `_id`.
    changed: Option<(String, Bson)>,
    odd: BTreeSet<Odd>,
    /// Collections whose `_id`s are documents.
    parts: BTreeSet<String>,
    /// Collections with a default collation, by their places.
    collated: BTreeSet<usize>,
    /// The state from which a collection is restored.
    backup: World,
    /// Number of large values that may still be written.
    large_left: u32,
}

/// A rule in progress.
#[derive(Debug, Clone)]
struct Scenario {
    number: usize,
    kind: Kind,
    source: usize,
    target: usize,
    /// The form of its references.
    shape: Shape,
    held_by: Held,
    /// Owned paths outside arrays, which rules of a chain may read.
    outputs: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Set,
    Into,
    Collect,
    Aggregate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Target,
    Source,
}

impl Scenario {
    /// The field that holds the references.
    fn field(&self) -> String {
        format!("r{}", self.number)
    }

    /// The index of the collection that holds them.
    fn holder(&self) -> usize {
        if self.held_by == Held::Target { self.target } else { self.source }
    }
}

impl Generator {
    /// A world of copy rules, in collections with the prefix `w<seed>_`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::with_options(seed, Options::new(format!("w{seed}_")))
    }

    /// A world with these options.
    #[must_use]
    pub fn with_options(seed: u64, options: Options) -> Self {
        let mut generator = Self {
            rng: StdRng::seed_from_u64(seed),
            variables: StdRng::seed_from_u64(seed ^ 0x6c65_7420),
            targets: StdRng::seed_from_u64(seed ^ 0x7461_7267),
            trees: StdRng::seed_from_u64(seed ^ 0x7472_6565),
            tree: None,
            created: StdRng::seed_from_u64(seed ^ 0x6372_6561),
            created_key: None,
            created_paths: Vec::new(),
            created_sources: BTreeSet::new(),
            beside: StdRng::seed_from_u64(seed ^ 0x6265_7369),
            shared: StdRng::seed_from_u64(seed ^ 0x7368_6172),
            is_shared: false,
            rare: StdRng::seed_from_u64(seed ^ 0x7261_7265),
            crowd: StdRng::seed_from_u64(seed ^ 0x6372_6f77),
            crowding: Crowding::None,
            frequencies: StdRng::seed_from_u64(seed ^ 0x6d6f_7265),
            hot: 0.0,
            edges: 0.2,
            drift: 0.0,
            leaving: 0.0,
            tree_ids: tree::IDS,
            echoed: None,
            numbers: Vec::new(),
            has_long_codes: false,
            collections: ["a", "b", "c", "d"].iter().map(|name| format!("{}{name}", options.prefix)).collect(),
            options,
            scenarios: Vec::new(),
            rules: Vec::new(),
            model: World::new(),
            deleted: Vec::new(),
            changed: None,
            odd: BTreeSet::new(),
            parts: BTreeSet::new(),
            collated: BTreeSet::new(),
            backup: World::new(),
            large_left: 4,
        };
        generator.odd = odd::drawn(&mut generator.rng, &generator.options.odd);
        generator.options.failing |= generator.has(Odd::Failing);
        generator.draw_frequent();
        generator.echoed = generator.draw_echoed();
        generator.draw_collations();
        generator.is_shared = generator.options.shared && generator.shared.random_bool(0.3);
        generator.crowding = Crowding::draw(&mut generator.crowd);
        generator.numbers = draw::numbers(&mut generator.rare, 9);
        if generator.is_crowded() {
            generator.numbers = draw::numbers(&mut generator.crowd, 2);
        }
        generator.draw_scenarios();
        generator.rules = (0..generator.scenarios.len()).map(|index| generator.draw_rule(index)).collect();
        if Oracle::new(&generator.rules, generator.database()).is_err() {
            // A sort by an array in which a rule writes makes a circle.
            for body in generator.rules.iter_mut().filter_map(parts::body) {
                if body.get_document("sort").is_ok_and(|sort| sort.contains_key("list")) {
                    body.insert("sort", doc! {"rank": 1});
                }
            }
        }
        generator.draw_tree();
        generator.draw_created();
        if !generator.is_plain() {
            generator.draw_parts(&mut StdRng::seed_from_u64(seed ^ 0x7061_7274));
        }
        generator
    }

    /// Draws the frequencies of this world: some bugs show only where rare things coincide.
    fn draw_frequent(&mut self) {
        let random = &mut self.frequencies;
        self.hot = if random.random_bool(0.25) { 0.8 } else { 0.0 };
        self.edges = if random.random_bool(0.3) { 0.5 } else { 0.2 };
        self.tree_ids = if random.random_bool(0.3) { 4 } else { tree::IDS };
        self.drift = if self.options.write_owned && random.random_bool(0.5) { 0.3 } else { 0.0 };
    }

    /// The entries of `rules:`.
    pub fn rules(&mut self) -> Vec<Document> {
        self.rules.clone()
    }

    /// The database of the collections.
    #[must_use]
    pub fn database(&self) -> &str {
        &self.options.database
    }

    /// The collections named in the rules.
    #[must_use]
    pub fn collections(&self) -> Vec<String> {
        let tree = self.tree.iter().map(|(coll, _)| coll.clone());
        self.used().into_iter().chain(tree).chain(self.created_collection()).collect()
    }

    /// Those that people write to.
    fn used(&self) -> Vec<String> {
        let used: BTreeSet<usize> =
            self.scenarios.iter().flat_map(|scenario| [scenario.source, scenario.target]).collect();
        used.into_iter().map(|index| self.collections[index].clone()).collect()
    }

    /// True if all rules write the same targets.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Collections that need `changeStreamPreAndPostImages`.
    #[must_use]
    pub fn pre_images(&self) -> BTreeSet<String> {
        Oracle::new(&self.rules, self.database()).map(|oracle| oracle.pre_images()).unwrap_or_default()
    }

    /// Indexes that the rules' lookups need: (collection, keys).
    #[must_use]
    pub fn indexes(&self) -> Vec<(String, Document)> {
        Oracle::new(&self.rules, self.database()).map(|oracle| oracle.indexes()).unwrap_or_default()
    }

    fn draw_scenarios(&mut self) {
        let mut count = self.rng.random_range(1..=self.options.max_rules.max(1));
        if self.is_shared {
            count = count.max(2);
        }
        let mut kinds = Vec::new();
        if self.options.copy || !(self.options.collect || self.options.aggregate) {
            kinds.extend([Kind::Set, Kind::Set, Kind::Set, Kind::Into]);
        }
        if self.options.collect {
            // Elements show where a source was.
            kinds.extend(std::iter::repeat_n(Kind::Collect, if self.is_plain() { 6 } else { 2 }));
        }
        if self.options.aggregate {
            kinds.extend([Kind::Aggregate, Kind::Aggregate]);
        }
        for number in 0..count {
            let usual = kinds.choose(&mut self.rng).copied().unwrap_or(Kind::Set);
            let kind = match usual {
                _ if self.has(Odd::Echo) && self.rng.random_bool(0.6) => Kind::Set,
                // The result of an expression becomes an element unchanged.
                Kind::Set if self.has(Odd::Empty) && self.rng.random_bool(0.4) => Kind::Into,
                usual => usual,
            };
            // Two sources and two targets; in a chain any collection may be either.
            let (source, target) = if self.options.chains {
                let previous = self.scenarios.last().map(|scenario| scenario.target);
                let source = previous.filter(|_| self.rng.random_bool(0.6)).unwrap_or(self.rng.random_range(0..4));
                (source, self.rng.random_range(0..4))
            } else {
                (self.rng.random_range(0..2), self.rng.random_range(2..4))
            };
            let held_by = match kind {
                Kind::Set if self.rng.random_bool(0.7) => Held::Target,
                Kind::Into => Held::Target,
                _ => Held::Source,
            };
            let mut shape = Shape::draw(&mut self.rng, kind == Kind::Into);
            let (mut held_by, mut source, mut target) = (held_by, source, target);
            if self.has(Odd::Echo) {
                // The stream filters out updates that look like our own, on collections that no rule reads from.
                source %= 3;
                if kind == Kind::Set && self.rng.random_bool(0.7) {
                    (held_by, target) = (Held::Target, ECHOED);
                    let shapes = [Shape::Dotted, Shape::Dotted, Shape::Pair, Shape::Scalar, Shape::Elements];
                    shape = shapes.choose(&mut self.rng).copied().unwrap_or(Shape::Dotted);
                    shape = self.echoed.unwrap_or(shape);
                }
            }
            if self.is_crowded() && !self.is_echoed(target) {
                (held_by, shape) = self.draw_crowded_form(kind, held_by, shape);
            }
            if let Some(first) = self.scenarios.first().filter(|_| self.is_shared) {
                target = first.target;
                if source == target && self.shared.random_bool(0.7) {
                    source = (target + self.shared.random_range(1..4)) % 4;
                }
            }
            self.scenarios.push(Scenario { number, kind, source, target, shape, held_by, outputs: Vec::new() });
        }
    }

    fn draw_rule(&mut self, index: usize) -> Document {
        let scenario = self.scenarios[index].clone();
        let (number, kind) = (scenario.number, scenario.kind);
        let mut body = doc! {
            "source": self.draw_side(scenario.source),
            "target": self.draw_side(scenario.target),
        };
        let by_id = self.draw_match(&scenario, &mut body);
        let sorted = !by_id || kind != Kind::Set || scenario.held_by == Held::Source || scenario.shape.is_array();
        if sorted && self.rng.random_bool(0.6) && !self.crowded_chance(0.5) {
            body.insert("sort", self.draw_sort());
        }
        let prefixes = match scenario.held_by {
            Held::Target => scenario.shape.prefixes(&scenario.field()),
            Held::Source => vec![String::new()],
        };
        let element = scenario.held_by == Held::Source && kind == Kind::Set && scenario.shape.has_fields();
        let mut outputs = Vec::new();
        match kind {
            Kind::Set => {
                let mut set = Document::new();
                // One rule writes in the matched elements or next to the array, not both; bare ids have no fields next
                // to them.
                let whole = prefixes.last().into_iter().filter(|prefix| !scenario.shape.is_bare(prefix));
                let own: Vec<&String> = prefixes.iter().take(1).chain(whole).collect();
                let prefix = own.choose(&mut self.rng).map_or(String::new(), |prefix| (*prefix).clone());
                let dotted = self.rng.random_bool(if self.has(Odd::Echo) { 0.0 } else { 0.3 });
                for part in 0..self.rng.random_range(1..=3) {
                    let leaf = if dotted { format!("o{number}.p{part}") } else { format!("o{number}_{part}") };
                    if prefix.is_empty() {
                        outputs.push(leaf.clone());
                    }
                    let value = if element && self.rng.random_bool(0.4) {
                        Bson::from(["$$element.role", "$$element"].choose(&mut self.rng).copied().unwrap_or_default())
                    } else {
                        self.draw_expression(&scenario)
                    };
                    set.insert(format!("{prefix}{leaf}"), value);
                }
                body.insert("set", set);
                self.draw_on_missing(&scenario, &mut body);
                self.draw_otherwise(&mut body);
            }
            Kind::Into => {
                let into = format!("o{number}");
                outputs.push(into.clone());
                body.insert("into", into);
                let element = self.draw_element(&scenario);
                body.insert("element", element);
                if self.rng.random_bool(0.3) {
                    body.insert("on_missing", "null");
                }
            }
            Kind::Collect => {
                let into = format!("o{number}{}", if self.rng.random_bool(0.2) { ".in" } else { "" });
                outputs.push(into.clone());
                body.insert("into", into);
                let element = self.draw_element(&scenario);
                body.insert("element", element);
                if self.rng.random_bool(0.5) {
                    self.draw_slice(&scenario, &mut body);
                }
            }
            Kind::Aggregate => {
                let mut set = Document::new();
                for part in 0..self.rng.random_range(1..=3) {
                    let path = format!("o{number}.{part}p");
                    outputs.push(path.clone());
                    let value = self.draw_accumulator();
                    set.insert(path, value);
                }
                body.insert("set", set);
                if scenario.held_by == Held::Source && scenario.shape.is_array() {
                    self.draw_rows(scenario.source, &mut body);
                }
                self.draw_let(&mut body);
                if self.draw_groups(number, &mut body) {
                    outputs.fill(format!("o{number}"));
                }
            }
        }
        if matches!(kind, Kind::Collect | Kind::Aggregate) && self.rng.random_bool(0.25) {
            body.insert("on_empty", "unset");
        }
        if !self.is_plain() {
            self.draw_target(&scenario, &mut body);
        }
        self.draw_sums(&scenario, &mut body, &mut outputs);
        self.draw_both_sides(&scenario, &mut body, &mut outputs);
        self.draw_inside_and_beside(&scenario, &mut body, &mut outputs);
        self.draw_touch(&mut body);
        self.scenarios[index].outputs = outputs;
        let word = match kind {
            Kind::Set | Kind::Into => "copy",
            Kind::Collect => "collect",
            Kind::Aggregate => "aggregate",
        };
        let mut rule = doc! {"name": format!("{}{number}", self.options.prefix), word: body};
        if self.options.write_owned {
            rule.insert("guard", if self.rng.random_bool(0.5) { "watch" } else { "audit" });
        }
        rule
    }

    /// Draws `match`, and sometimes `key_type`; returns true if the other side's key is `_id`.
    fn draw_match(&mut self, scenario: &Scenario, body: &mut Document) -> bool {
        // In a chain, an earlier rule may have written the reference itself.
        if self.options.chains && scenario.held_by == Held::Target && scenario.shape == Shape::Scalar {
            let earlier = self.scenarios.iter().filter(|earlier| {
                earlier.number < scenario.number && earlier.target == scenario.target && earlier.kind == Kind::Set
            });
            let outputs: Vec<String> = earlier.flat_map(|earlier| earlier.outputs.clone()).collect();
            if self.rng.random_bool(0.3)
                && let Some(output) = outputs.choose(&mut self.rng)
            {
                body.insert("match", doc! {output: "_id"});
                return true;
            }
        }
        let paths = scenario.shape.key_paths(&scenario.field());
        let other: Vec<&str> = if paths.len() == 2 {
            vec!["tenant", "code"]
        } else if self.is_plain() || (self.rng.random_bool(0.7) && !self.crowded_chance(0.3)) {
            vec!["_id"]
        } else {
            vec!["code"]
        };
        let mut on = Document::new();
        let mixed = self.options.mixed_composite && other == ["code"] && scenario.shape.is_array();
        if mixed {
            on.insert("tenant", "tenant");
        }
        for (path, other) in paths.iter().zip(&other) {
            match scenario.held_by {
                Held::Target => on.insert(path, *other),
                Held::Source => on.insert(*other, path.as_str()),
            };
        }
        body.insert("match", on);
        if paths.len() == 1 && !mixed && !self.is_plain() && self.rng.random_bool(0.15) {
            body.insert("key_type", if self.rng.random_bool(0.5) { "objectId" } else { "string" });
        }
        other == ["_id"]
    }

    fn draw_side(&mut self, nth: usize) -> Bson {
        let collection = self.collections[nth].clone();
        if self.rng.random_bool(if self.has(Odd::Collation) { 0.4 } else { 0.8 }) {
            return Bson::String(collection);
        }
        let filter = match self.rng.random_range(0..6) {
            _ if self.has(Odd::Collation) && self.rng.random_bool(0.5) => doc! {"label": {"$lt": "a"}},
            0 => doc! {"status": "open"},
            1 => doc! {"status": {"$in": ["open", "draft"]}},
            2 => doc! {"status": {"$ne": "closed"}},
            3 => doc! {"num": {"$gte": 2}},
            4 => doc! {"label": {"$exists": true}},
            _ => doc! {"status": "open", "num": {"$lt": 4}},
        };
        if self.is_echoed(nth) || self.is_plain() {
            return Bson::String(collection);
        }
        Bson::Document(doc! {"collection": collection, "where": filter})
    }

    fn draw_sort(&mut self) -> Document {
        let way = if self.rng.random_bool(0.5) { 1 } else { -1 };
        match self.rng.random_range(0..4) {
            0 => doc! {"rank": way, "num": -way},
            1 => doc! {"info.a": way},
            2 if way > 0 => doc! {"list": way},
            2 => doc! {"list.x": way},
            _ => doc! {"rank": way},
        }
    }

    /// Draws the number of elements that a `collect` rule keeps; the last ones often by an array.
    fn draw_slice(&mut self, scenario: &Scenario, body: &mut Document) {
        let slice = [-3, -2, -1, 1, 2, 3].choose(&mut self.rng).copied().unwrap_or(2);
        body.insert("slice", slice);
        if slice < 0 && !scenario.shape.is_array() && self.rare.random_bool(0.4) {
            let path = ["list", "list.x"].choose(&mut self.rare).copied().unwrap_or("list");
            body.insert("sort", doc! {path: if self.rare.random_bool(0.5) { 1 } else { -1 }});
        }
    }

    fn draw_on_missing(&mut self, scenario: &Scenario, body: &mut Document) {
        if scenario.held_by == Held::Source {
            return;
        }
        // Several references for one value: there is no single element to remove, nor a single time from which to keep
        // it.
        let several = scenario.shape.is_array()
            && body.get_document("set").is_ok_and(|set| !set.keys().all(|path| path.contains("$[]")));
        let destroys = self.options.destroy && !several && self.rng.random_bool(0.4);
        let fills = self.is_plain() && self.options.once && !several && !destroys && self.crowd.random_bool(0.3);
        let word = match self.rng.random_range(0..10) {
            _ if destroys && scenario.shape.is_array() => "remove",
            _ if destroys => "delete",
            _ if fills => {
                body.insert("once", true);
                return;
            }
            0..=1 => "null",
            2..=3 => "keep",
            4..=5 if self.options.once && !several => {
                body.insert("once", true);
                return;
            }
            _ => return,
        };
        body.insert("on_missing", word);
    }

    fn draw_element(&mut self, scenario: &Scenario) -> Bson {
        if let Some(odd) = self.draw_odd_expression() {
            return odd;
        }
        match self.rng.random_range(0..5) {
            0 => Bson::from("$_id"),
            1 => Bson::Document(doc! {"name": "$name", "at": "$rank"}),
            2 => Bson::Document(doc! {"id": "$_id", "v": self.draw_expression(scenario), "n": "$num"}),
            _ => Bson::Document(doc! {"id": "$_id", "name": "$name"}),
        }
    }

    /// Gives some copies values for targets without a source.
    fn draw_otherwise(&mut self, body: &mut Document) {
        // So that a target without a reference could wrongly get the values of a source whose key is MinKey.
        let more = self.has(Odd::EdgeIds) && self.crowd.random_bool(0.4);
        let has_policy = body.contains_key("on_missing") || body.contains_key("once");
        if has_policy || (self.variables.random_bool(0.7) && !more) {
            return;
        }
        let Ok(set) = body.get_document("set") else { return };
        let values: [Bson; 4] = ["none".into(), 0.into(), Bson::Null, doc! {"none": true}.into()];
        let mut otherwise = Document::new();
        for path in set.keys() {
            if otherwise.is_empty() || self.variables.random_bool(0.6) {
                otherwise.insert(path, values.choose(&mut self.variables).cloned().unwrap_or(Bson::Null));
            }
        }
        body.insert("otherwise", otherwise);
    }

    /// Makes some accumulators and the filter use the elements of the source's array.
    fn draw_rows(&mut self, source: usize, body: &mut Document) {
        for (_, value) in body.get_document_mut("set").into_iter().flat_map(Document::iter_mut) {
            let Some((_, operand)) = value.as_document_mut().and_then(|value| value.iter_mut().next()) else {
                continue;
            };
            if operand.as_str().is_some() && self.variables.random_bool(0.4) {
                let elements = ["$$element.role", "$$element"];
                *operand = elements.choose(&mut self.variables).copied().unwrap_or_default().into();
            }
        }
        if self.variables.random_bool(0.3) {
            let has_role = doc! {"$eq": ["$$element.role", {"$ifNull": ["$$element.role", "none"]}]};
            let mut side = match body.get("source") {
                Some(Bson::Document(side)) => side.clone(),
                _ => doc! {"collection": self.collections[source].clone()},
            };
            let mut filter = side.get_document("where").cloned().unwrap_or_default();
            filter.insert("$expr", has_role);
            side.insert("where", filter);
            body.insert("source", side);
        }
    }

    /// Turns some `aggregate` rules into one with groups; returns true if it did.
    fn draw_groups(&mut self, number: usize, body: &mut Document) -> bool {
        if self.variables.random_bool(0.6) {
            return false;
        }
        let Ok(set) = body.get_document("set").cloned() else { return false };
        let set: Document = set.into_iter().enumerate().map(|(nth, (_, value))| (format!("f{nth}"), value)).collect();
        body.remove("sort");
        if self.variables.random_bool(0.6) {
            let name = format!("f{}", self.variables.random_range(0..set.len()));
            body.insert("sort", doc! {name: if self.variables.random_bool(0.5) { 1 } else { -1 }});
        }
        let values = ["$name", "$num", "$label", "$n", "$tags", "$info.a"];
        let mut draw = || Bson::from(values.choose(&mut self.variables).copied().unwrap_or("$name"));
        let mut by = doc! {"g": draw()};
        if self.variables.random_bool(0.3) {
            body.insert("as", "object");
            by = doc! {"g": {"$ifNull": ["$label", "none"]}};
        } else if self.variables.random_bool(0.3) {
            let other = Bson::from(values.choose(&mut self.variables).copied().unwrap_or("$name"));
            by.insert("h", other);
        }
        if self.variables.random_bool(0.3) {
            body.insert("slice", [-2, -1, 1, 2].choose(&mut self.variables).copied().unwrap_or(2));
        }
        body.extend(doc! {"by": by, "into": format!("o{number}"), "set": set});
        true
    }

    /// Turns some accumulators of an `aggregate` into expressions over variables of `let`.
    fn draw_let(&mut self, body: &mut Document) {
        let Ok(set) = body.get_document_mut("set") else { return };
        let mut variables = Document::new();
        for (nth, (_, value)) in set.iter_mut().enumerate() {
            if self.variables.random_bool(0.7) {
                continue;
            }
            let name = format!("v{nth}");
            let accumulator = value.clone();
            let size =
                accumulator.as_document().is_some_and(|doc| doc.contains_key("$addToSet") || doc.contains_key("$push"));
            let variable = Bson::from(format!("$${name}"));
            *value = match self.variables.random_range(0..5) {
                _ if size && self.variables.random_bool(0.5) => doc! {"$size": variable}.into(),
                0 => variable,
                1 => doc! {"$ifNull": [variable, "none"]}.into(),
                2 => doc! {"in": [variable, 1], "n": "$$rows"}.into(),
                3 => doc! {"$cond": [{"$eq": ["$$rows", 0]}, "nothing", variable]}.into(),
                _ => doc! {"$add": ["$$rows", 1]}.into(),
            };
            let text = value.to_string();
            for (name, accumulator) in [(name, accumulator), ("rows".to_owned(), doc! {"$sum": 1}.into())] {
                if text.contains(&format!("$${name}")) {
                    variables.insert(name, accumulator);
                }
            }
        }
        if !variables.is_empty() {
            body.insert("let", variables);
        }
    }

    fn draw_accumulator(&mut self) -> Document {
        let operands: &[&str] =
            if self.has(Odd::Empty) { &["$n", "$num", "$tags", "$info"] } else { &["$n", "$num", "$n"] };
        let operand = operands.choose(&mut self.rng).copied().unwrap_or("$n");
        match self.rng.random_range(0..10) {
            0 => doc! {"$sum": 1},
            1 => doc! {"$count": {}},
            2 => doc! {"$avg": operand},
            3 => doc! {"$min": operand},
            4 => doc! {"$max": operand},
            5 => doc! {"$first": operand},
            6 => doc! {"$last": "$name"},
            7 => doc! {"$push": operand},
            8 => doc! {"$addToSet": operand},
            _ => doc! {"$sum": operand},
        }
    }

    fn draw_expression(&mut self, scenario: &Scenario) -> Bson {
        if self.options.failing && !self.has(Odd::Failing) && self.frequencies.random_bool(0.2) {
            return odd::failing_expression(&mut self.frequencies);
        }
        if self.crowded_chance(0.5) {
            return Bson::from("$name");
        }
        let earlier = self
            .scenarios
            .iter()
            .filter(|earlier| earlier.number < scenario.number && earlier.target == scenario.source);
        let outputs: Vec<String> = earlier.flat_map(|earlier| earlier.outputs.clone()).collect();
        if self.options.chains
            && self.rng.random_bool(0.6)
            && let Some(output) = outputs.choose(&mut self.rng)
        {
            return Bson::String(format!("${output}"));
        }
        if let Some(odd) = self.draw_odd_expression() {
            return odd;
        }
        // The whole document, unless some rule writes into it: that could be a cycle.
        let untouched = self.is_untouched(scenario.source);
        let failing = self.options.failing;
        match self.rng.random_range(0..19) {
            0 => Bson::from("$info"),
            1 => Bson::from("$info.a"),
            2 => Bson::from("$info.b.c"),
            3 => Bson::from("$tags"),
            4 => Bson::from("$list.x"),
            5 => Bson::Document(doc! {"name": "$name", "num": "$num", "in": {"a": "$info.a"}}),
            6 => Bson::Document(doc! {"$ifNull": ["$name", "$label", "none"]}),
            7 => Bson::Document(doc! {"$concat": [{"$ifNull": ["$label", ""]}, "/", "$label"]}),
            8 => Bson::Document(doc! {"$toUpper": "$label"}),
            9 => Bson::Document(doc! {"$literal": "$name"}),
            10 => Bson::Document(doc! {"$add": ["$num", 1]}),
            11 => [Bson::Int32(5), Bson::from("text"), Bson::Boolean(false), Bson::Null]
                .choose(&mut self.rng)
                .cloned()
                .unwrap_or(Bson::Null),
            12 if untouched => Bson::from("$$ROOT"),
            13 => Bson::Array(vec![Bson::from("$name"), Bson::from("$num")]),
            14 if failing => Bson::Document(doc! {"$concat": ["$name", "!"]}),
            15 if failing => Bson::Document(doc! {"$add": ["$n", 1]}),
            _ => Bson::from("$name"),
        }
    }

    /// True if no rule writes to this collection.
    fn is_untouched(&self, collection: usize) -> bool {
        self.scenarios.iter().all(|scenario| scenario.target != collection)
    }

    /// The first documents of every collection.
    pub fn initial(&mut self) -> Vec<Op> {
        let mut ops = Vec::new();
        for coll in self.used() {
            for nth in 0..self.options.documents {
                let id = crowd::IDS.get(nth).filter(|_| self.is_crowded()).copied().map(Bson::Int32);
                let mut doc = self.draw_document(&coll, id);
                self.draw_overwritten(&coll, &mut doc);
                ops.push(Op::Insert { coll: coll.clone(), doc });
            }
        }
        ops.extend(self.tree_initial());
        for op in &ops {
            self.record(op);
        }
        self.back_up();
        ops.into_iter().map(|op| self.stored(op)).collect()
    }

    /// The next operation of the history.
    pub fn op(&mut self) -> Op {
        let op = self.draw_op();
        self.record(&op);
        self.stored(op)
    }

    fn draw_op(&mut self) -> Op {
        if let Some(op) = self.draw_tree_op() {
            return op;
        }
        if let Some(op) = self.draw_meddling().or_else(|| self.draw_fill()) {
            return op;
        }
        if let Some(op) = self.draw_crowded_op().or_else(|| self.draw_drift()) {
            return op;
        }
        if let Some(op) = self.draw_leaving() {
            return op;
        }
        let collections = self.used();
        let coll = collections.choose(&mut self.rng).cloned().unwrap_or_default();
        let filter = doc! {"_id": self.draw_known_id(&coll)};
        if let Some(op) = self.draw_odd(&coll) {
            return op;
        }
        let again = self.deleted.iter().position(|(gone, _)| *gone == coll);
        match self.rng.random_range(0..100) {
            0..=9 => Op::Insert { doc: self.draw_document(&coll, None), coll },
            10..=17 if again.is_some() => {
                let id = again.map(|position| self.deleted.remove(position).1);
                Op::Insert { doc: self.draw_document(&coll, id), coll }
            }
            18..=26 => Op::Delete { coll, filter },
            27..=36 => {
                let mut doc = self.draw_document(&coll, Some(Bson::Null));
                doc.remove("_id");
                Op::Replace { coll, filter, doc }
            }
            _ => Op::Update { update: self.draw_update(&coll, &filter), coll, filter },
        }
    }

    /// Sometimes an update of an owned field.
    fn draw_drift(&mut self) -> Option<Op> {
        if !self.frequencies.random_bool(self.drift) {
            return None;
        }
        let scenario = self.scenarios.choose(&mut self.frequencies)?;
        let coll = self.collections[scenario.target].clone();
        let path = scenario.outputs.choose(&mut self.frequencies)?.clone();
        let filter = doc! {"_id": self.model.get(&coll)?.choose(&mut self.frequencies)?.get("_id").cloned()};
        let update = if self.frequencies.random_bool(0.5) {
            doc! {"$set": {path: "drift"}}
        } else {
            doc! {"$unset": {path: ""}}
        };
        Some(Op::Update { coll, filter, update })
    }

    /// Applies it to the users' model of the world; an operation that the server would refuse changes nothing.
    fn record(&mut self, op: &Op) {
        // The fate of created documents is not known here.
        if self.created_collection().is_some_and(|created| op.coll() == created) {
            return;
        }
        self.changed = None;
        if op.apply(&mut self.model).is_err() {
            return;
        }
        let id = |document: &Document| document.get("_id").cloned().unwrap_or(Bson::Null);
        match op {
            Op::Insert { coll, doc } => self.changed = Some((coll.clone(), id(doc))),
            Op::Update { coll, filter, .. } | Op::Replace { coll, filter, .. } => {
                self.changed = Some((coll.clone(), id(filter)));
            }
            Op::Delete { coll, filter } => self.deleted.push((coll.clone(), id(filter))),
            Op::Drop { .. } | Op::Restore { .. } | Op::Rename { .. } | Op::PreImages { .. } => {}
        }
    }
}
