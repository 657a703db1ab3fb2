//! Advice on all collections together: `$lookup`, regular expressions, the number of collections, the cache.

use std::collections::BTreeMap;

use crate::{
    advice::{Advice, Kind, bytes, count, counted, figure},
    inventory::Inventory,
    reads::Reads,
};
use denormd_model::distribution::ratio;
use denormd_rules::config::Advise;

/// Minimum number of reads from which a share is computed.
const FEW: u64 = 20;
/// Percentage of the cache that data may fill. WiredTiger's `eviction_target` of 80% keeps the rest for writes.
const CACHE_PERCENT: u64 = 80;

/// Gives the advice on the cluster as a whole.
#[must_use]
pub fn decide(inspection: &Inventory, reads: &Reads, thresholds: &Advise) -> Vec<Advice> {
    let mut advice = Vec::new();
    advice.extend(lookups(reads, thresholds));
    advice.extend(regexes(reads));
    advice.extend(collections(inspection, thresholds));
    advice.extend(cache(inspection, reads));
    advice
}

fn lookups(reads: &Reads, thresholds: &Advise) -> Option<Advice> {
    let (lookups, commands) = (reads.lookups?, reads.commands?);
    if commands < FEW || lookups * 100 <= commands.saturating_mul(thresholds.lookup_percent) {
        return None;
    }
    let says = format!(
        "{} of {} {} were $lookup, {}%, more than {}%: what is joined that often is better copied or embedded",
        count(lookups),
        counted(commands, "read"),
        reads.basis(),
        figure(ratio(lookups * 100, commands)),
        thresholds.lookup_percent
    );
    Some(Advice::new(Kind::LookupShare, 6, says))
}

fn regexes(reads: &Reads) -> Vec<Advice> {
    let mut seen: BTreeMap<(String, String), u64> = BTreeMap::new();
    for query in &reads.slow {
        for path in &query.ignores_case {
            *seen.entry((query.namespace.to_string(), path.clone())).or_default() += 1;
        }
    }
    let all =
        reads.regexes.map(|all| format!(" ({} $regex of all kinds {})", count(all), reads.basis())).unwrap_or_default();
    seen.into_iter()
        .map(|((namespace, path), times)| {
            let says = format!(
                "{} of `{namespace}` in the log match {path} by a regular expression that ignores case, which no index serves{all}: \
                 an index with a collation of strength 2 does, or a second field in lower case",
                counted(times, "slow read")
            );
            Advice::new(Kind::IgnoreCase, 6, says)
        })
        .collect()
}

fn collections(inspection: &Inventory, thresholds: &Advise) -> Option<Advice> {
    let says = format!(
        "{}, more than {}: each takes a file and memory, and so does each of its indexes",
        counted(inspection.listed, "collection"),
        count(thresholds.collections)
    );
    (inspection.listed > thresholds.collections).then(|| Advice::new(Kind::Collections, None, says))
}

/// Warns if the collections in use do not fit the cache.
fn cache(inspection: &Inventory, reads: &Reads) -> Option<Advice> {
    let cache = reads.cache?;
    let hot: Vec<_> = inspection
        .collections
        .iter()
        .filter(|collection| reads.of(&collection.namespace).is_some_and(|used| used.reads + used.writes > 0))
        .collect();
    let size: u64 = hot.iter().map(|collection| collection.bytes + collection.index_bytes).sum();
    if size * 100 <= cache.size * CACHE_PERCENT {
        return None;
    }
    let largest = hot.iter().max_by_key(|collection| collection.bytes)?;
    let says = format!(
        "the {} that were used {} hold {} with their indexes, the smallest cache {}; {} were read into it: larger documents than a page needs \
         (`{}` has {}) push others out",
        counted(hot.len() as u64, "collection"),
        reads.basis(),
        bytes(size),
        bytes(cache.size),
        bytes(cache.read),
        largest.namespace.collection,
        bytes(largest.bytes)
    );
    Some(Advice::new(Kind::Cache, 6, says))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::slow_query;

    fn kinds(inspection: &Inventory, reads: &Reads) -> Vec<Kind> {
        decide(inspection, reads, &Advise::default()).iter().map(|advice| advice.kind).collect()
    }

    #[test]
    fn lookups_are_counted_against_all_reads() {
        for (lookups, commands, expected) in [
            (Some(11), Some(100), vec![Kind::LookupShare]),
            (Some(10), Some(100), vec![]),
            (Some(10), Some(10), vec![]),
            (None, Some(100), vec![]),
        ] {
            let reads = Reads { commands, lookups, ..Reads::default() };
            assert_eq!(kinds(&Inventory::default(), &reads), expected, "{lookups:?} of {commands:?}");
        }
    }

    #[test]
    fn too_many_collections_and_regular_expressions() {
        let inspection = Inventory { listed: 10_001, ..Inventory::default() };
        assert_eq!(kinds(&inspection, &Reads::default()), [Kind::Collections]);
        let line = r#"{"msg":"Slow query","attr":{"ns":"a.b","command":{"find":"b","filter":{"name":{"$regex":"^x","$options":"i"}}}}}"#;
        let reads = Reads { slow: vec![slow_query(line).unwrap()], ..Reads::default() };
        assert_eq!(kinds(&Inventory::default(), &reads), [Kind::IgnoreCase]);
    }
}
