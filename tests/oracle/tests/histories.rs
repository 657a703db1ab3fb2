//! The generator against the oracle alone: its output is within the rule language, and repeated application converges.

use bson::Document;
use denormd_oracle::{Generator, Odd, Op, Options, Oracle, World, differences};

fn every_kind(seed: u64) -> Options {
    let all = Options::everything(format!("w{seed}_"));
    match seed % 5 {
        0 => Options::new(format!("w{seed}_")),
        1 => all,
        2 => Options { destroy: true, mixed_composite: true, write_owned: true, id_parts: true, ..all },
        3 => Options { failing: true, chains: false, ..all },
        // Large values are tested on a server.
        _ => Options { odd: Odd::ALL.into_iter().filter(|odd| *odd != Odd::Large).collect(), ..all },
    }
}

#[test]
fn a_converged_world_stays_and_a_history_disturbs_it() {
    let (mut disturbed, mut noted, mut refused, mut ops) = (0, 0, 0, 0);
    for seed in 0..400 {
        let mut generator = Generator::with_options(seed, every_kind(seed));
        let rules = generator.rules();
        let oracle = Oracle::new(&rules, generator.database()).unwrap_or_else(|why| panic!("{why}: {rules:#?}"));
        let mut world = World::new();
        let mut step = |op: &Op, world: &mut World| {
            ops += 1;
            refused += usize::from(op.apply(world).is_err());
        };
        for op in generator.initial() {
            step(&op, &mut world);
        }
        for _ in 0..10 {
            for _ in 0..8 {
                step(&generator.op(), &mut world);
            }
            let expectation = oracle.expected(&world).unwrap();
            disturbed += usize::from(!differences(&expectation, &world).is_empty());
            noted += expectation.notes.len();
            world = expectation.world;
            // References that a deleted document leaves dangling in its own collection are processed next, and so are
            // documents that the second of two rules has inserted, by the first.
            let creating = rules.iter().filter(|rule| rule.to_string().contains("\"create\": true")).count();
            for _ in 0..if seed % 5 == 2 { 5 } else { usize::from(creating > 1) } {
                world = oracle.expected(&world).unwrap().world;
            }
            let again = oracle.expected(&world).unwrap();
            assert_eq!(differences(&again, &world), Vec::<String>::new(), "seed {seed}: {rules:#?}");
        }
    }
    println!("{disturbed} of 4000 disturbed, {noted} notes, {refused} of {ops} refused");
    assert!(disturbed > 2500, "{disturbed}");
    assert!(refused * 4 < ops, "{refused} of {ops}");
}

#[test]
fn the_same_seed_draws_the_same_world() {
    let draw = |seed| {
        let mut generator = Generator::with_options(seed, every_kind(seed));
        let mut ops = generator.initial();
        ops.extend((0..50).map(|_| generator.op()));
        format!("{:?} {:?} {:?}", generator.rules(), generator.indexes(), ops)
    };
    for seed in 0..8 {
        assert_eq!(draw(seed), draw(seed));
    }
}

#[test]
fn every_form_is_drawn() {
    let rules: Vec<Document> =
        (0..400).flat_map(|seed| Generator::with_options(seed, every_kind(seed)).rules()).collect();
    let text = rules.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    for form in [
        "copy",
        "collect",
        "aggregate",
        "into",
        "slice",
        "sort",
        "where",
        "once",
        "key_type",
        "$id",
        ".b.$[].c",
        ".ids.$[]",
        "$$element",
        "$$target.",
        "$$targetElement.role",
        "list.$[].x",
        "_w\"",
        "_e\"",
        "touch",
        "$$ROOT",
        "remove",
        "delete",
        "keep",
        "\"null\"",
        "guard",
        "tenant",
        "on_empty",
        "$range",
    ] {
        assert!(text.contains(form), "{form}");
    }
}

#[test]
fn every_odd_kind_is_drawn() {
    let (mut seen, mut commands) = (std::collections::BTreeSet::new(), String::new());
    for seed in 0..200 {
        let options = Options { odd: Odd::ALL.to_vec(), ..Options::everything(format!("w{seed}_")) };
        let mut generator = Generator::with_options(seed, options);
        seen.extend(generator.odd());
        if generator.has(Odd::Large) {
            continue;
        }
        let mut ops = generator.initial();
        ops.extend((0..60).map(|_| generator.op()));
        commands.push_str(&format!("{ops:?}"));
    }
    assert_eq!(seen.len(), Odd::ALL.len(), "{seen:?}");
    for form in [
        "Drop",
        "Restore",
        "Rename",
        "PreImages",
        "MinKey",
        "MaxKey",
        "\\u{f8ff}",
        "\"old\"",
        "1e100",
        "0000001\"",
        ".note\"",
        "\"stamp\"",
    ] {
        assert!(commands.contains(form), "{form}");
    }
}
