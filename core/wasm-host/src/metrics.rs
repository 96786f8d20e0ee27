//! A policy's own counters and gauges. They outlive the instance, so that a
//! policy that was started anew goes on counting where it was.

use std::collections::BTreeMap;
use tally_contract::limits::METRIC_NAME_BYTES_MAX;
use tally_ipc::text::printable;

/// The id of a metric beyond the limit: it counts nothing.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
enum Value {
    Counter(u64),
    Gauge(i64),
}

/// Counters and gauges by id.
#[derive(Debug)]
pub struct Metrics {
    list: Vec<(String, Value)>,
    max: usize,
}

impl Metrics {
    pub fn new(max: usize) -> Self {
        Metrics { list: Vec::new(), max }
    }

    pub fn counter(&mut self, name: &str) -> u32 {
        self.id(name, Value::Counter(0))
    }

    pub fn gauge(&mut self, name: &str) -> u32 {
        self.id(name, Value::Gauge(0))
    }

    /// Adds to a counter; an id that is none is ignored.
    pub fn add(&mut self, counter: u32, delta: u64) {
        if let Some((_, Value::Counter(value))) = self.list.get_mut(counter as usize) {
            *value = value.wrapping_add(delta);
        }
    }

    /// Sets a gauge; an id that is none is ignored.
    pub fn set(&mut self, gauge: u32, to: i64) {
        if let Some((_, Value::Gauge(value))) = self.list.get_mut(gauge as usize) {
            *value = to;
        }
    }

    pub fn counters(&self) -> BTreeMap<String, u64> {
        let counters = self.list.iter().filter_map(|(name, value)| match value {
            Value::Counter(value) => Some((name.clone(), *value)),
            Value::Gauge(_) => None,
        });
        counters.collect()
    }

    pub fn gauges(&self) -> BTreeMap<String, i64> {
        let gauges = self.list.iter().filter_map(|(name, value)| match value {
            Value::Gauge(value) => Some((name.clone(), *value)),
            Value::Counter(_) => None,
        });
        gauges.collect()
    }

    fn id(&mut self, name: &str, new: Value) -> u32 {
        let name = printable(beginning(name, METRIC_NAME_BYTES_MAX).into());
        let same = |(known, value): &(String, Value)| {
            *known == name && std::mem::discriminant(value) == std::mem::discriminant(&new)
        };
        if let Some(id) = self.list.iter().position(same) {
            return id as u32;
        }
        if self.list.len() >= self.max {
            return NONE;
        }
        self.list.push((name, new));
        (self.list.len() - 1) as u32
    }
}

/// The beginning of a text: at most `bytes_max` bytes, and whole characters only.
pub fn beginning(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_one_id_and_a_bound() {
        let mut metrics = Metrics::new(2);
        let a = metrics.counter("a");
        assert_eq!(metrics.counter("a"), a);
        let g = metrics.gauge("a");
        assert_ne!(a, g);
        assert_eq!(metrics.counter("b"), NONE);
        metrics.add(a, 2);
        metrics.add(a, 3);
        metrics.set(g, -1);
        // Wrong kinds and unknown ids are ignored.
        metrics.add(g, 9);
        metrics.set(a, 9);
        metrics.add(NONE, 9);
        assert_eq!(metrics.counters(), BTreeMap::from([("a".into(), 5)]));
        assert_eq!(metrics.gauges(), BTreeMap::from([("a".into(), -1)]));
    }

    #[test]
    fn names_are_shortened_between_characters() {
        assert_eq!(beginning("aé", 2), "a");
        assert_eq!(beginning("aé", 3), "aé");
        assert_eq!(beginning("", 3), "");
    }
}
