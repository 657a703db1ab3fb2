//! `make mutants` plants the bugs of mutants.toml. This test checks, without a build, that they still fit the source.

use std::{fs, path::Path};

#[test]
fn every_planted_bug_fits_the_source() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mutants: toml::Table = fs::read_to_string(project.join("tests/mutants.toml")).unwrap().parse().unwrap();
    let mutants = mutants["mutant"].as_array().unwrap();
    assert!(mutants.len() > 60, "{}", mutants.len());
    for mutant in mutants {
        let of = |name: &str| mutant[name].as_str().unwrap();
        let times = fs::read_to_string(project.join(of("file"))).unwrap().matches(of("old")).count();
        assert_eq!(times, 1, "what `{}` replaces is {times} times in {}", of("name"), of("file"));
    }
}
