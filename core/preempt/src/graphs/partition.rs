//! Where a graph is divided: from nodes and edges to contiguous pieces of a topological order.
//!
//! Pure: no driver, no handles, the same answer every time for the same input. The rules:
//! - A graph may be divided at a point only if every node before it is ordered before every node behind it. So pieces
//!   launched one after the other add no order, and parallel branches, which may wait for each other, stay together.
//! - A node that is to stand alone becomes a piece if the graph may be divided on both sides of it.
//! - Any other piece has at most the wanted number of kernels, unless it cannot be divided earlier.
//! - A node without kernels stays with the kernels before it. So every piece has a kernel, except next to nodes that
//!   stand alone.
//! - There are as few pieces as the wanted number allows, of about the same size.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Nodes in an order, divided into pieces.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pieces {
    /// Indices of all nodes, each after those that it depends on.
    pub order: Vec<usize>,
    /// Where the pieces lie in `order`: without gaps, none empty.
    pub pieces: Vec<Range<usize>>,
}

/// The edges go round in a circle, or name nodes that do not exist.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct NotAnOrder;

/// Divide a graph: `kernels` of each node, whether it is to stand alone, edges `(from, to)` by index, and the
/// kernels wanted in a piece (0 counts as 1).
///
/// # Errors
/// If the edges allow no order.
pub fn divide(
    kernels: &[u32],
    alone: impl Fn(usize) -> bool,
    edges: &[(usize, usize)],
    kernels_per_piece: u32,
) -> Result<Pieces, NotAnOrder> {
    let order = order(kernels.len(), edges)?;
    let between = separators(&order, edges);
    let alone_at = |at: usize| alone(order[at]) && between[at] && between[at + 1];
    let together = order.iter().enumerate().filter(|(at, _)| !alone_at(*at));
    let together = together.map(|(_, node)| (*node, &kernels[*node]));
    let total: u64 = together.map(|(_, k)| u64::from(*k)).sum();
    let wanted = u64::from(kernels_per_piece.max(1));
    // Not 50 + 50 + 1 but 34 + 34 + 33.
    let limit = total.div_ceil(total.div_ceil(wanted).max(1)).max(1);
    let mut pieces = Vec::new();
    let (mut start, mut inside) = (0, 0);
    for (at, node) in order.iter().enumerate() {
        if alone_at(at) {
            pieces.extend((start < at).then_some(start..at));
            pieces.push(at..at + 1);
            (start, inside) = (at + 1, 0);
            continue;
        }
        let more = u64::from(kernels[*node]);
        if inside > 0 && more > 0 && inside + more > limit && between[at] {
            pieces.push(start..at);
            (start, inside) = (at, 0);
        }
        inside += more;
    }
    if start < order.len() {
        pieces.push(start..order.len());
    }
    Ok(Pieces { order, pieces })
}

/// For each place in the order, before the first node to behind the last, whether all nodes before it are ordered
/// before all behind it.
///
/// They are if every node at the end of what is before (none before depends on it) has an edge to every node
/// at the beginning of what is behind (it depends on none behind): any path between the two must be one edge.
fn separators(order: &[usize], edges: &[(usize, usize)]) -> Vec<bool> {
    /// More nodes side by side are not looked at: there is no boundary.
    const BREADTH_MAX: usize = 64;
    let nodes = order.len();
    let (mut before, mut after) = (vec![Vec::new(); nodes], vec![Vec::new(); nodes]);
    for (from, to) in edges {
        before[*to].push(*from);
        after[*from].push(*to);
    }
    // Edges given twice count once.
    for list in before.iter_mut().chain(&mut after) {
        list.sort_unstable();
        list.dedup();
    }
    let mut missing: Vec<usize> = before.iter().map(Vec::len).collect();
    let mut is_end = vec![false; nodes];
    let (mut ends, mut beginnings) = (Vec::new(), Vec::new());
    beginnings.extend((0..nodes).filter(|n| missing[*n] == 0));
    let mut between = vec![true];
    for node in order {
        for earlier in &before[*node] {
            is_end[*earlier] = false;
        }
        is_end[*node] = true;
        ends.retain(|n: &usize| is_end[*n]);
        ends.push(*node);
        beginnings.retain(|n| n != node);
        for later in &after[*node] {
            missing[*later] -= 1;
            if missing[*later] == 0 {
                beginnings.push(*later);
            }
        }
        let is_narrow = ends.len() <= BREADTH_MAX && beginnings.len() <= BREADTH_MAX;
        let has_all = |to: &usize| ends.iter().all(|from| before[*to].binary_search(from).is_ok());
        between.push(is_narrow && beginnings.iter().all(has_all));
    }
    between
}

fn order(nodes: usize, edges: &[(usize, usize)]) -> Result<Vec<usize>, NotAnOrder> {
    let mut missing = vec![0_usize; nodes];
    let mut next = vec![Vec::new(); nodes];
    for (from, to) in edges {
        next.get_mut(*from).ok_or(NotAnOrder)?.push(*to);
        *missing.get_mut(*to).ok_or(NotAnOrder)? += 1;
    }
    let mut ready: BinaryHeap<_> = (0..nodes).filter(|n| missing[*n] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(nodes);
    while let Some(Reverse(node)) = ready.pop() {
        order.push(node);
        for to in &next[node] {
            missing[*to] -= 1;
            if missing[*to] == 0 {
                ready.push(Reverse(*to));
            }
        }
    }
    if order.len() == nodes { Ok(order) } else { Err(NotAnOrder) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn none(_: usize) -> bool {
        false
    }

    fn sizes(pieces: &Pieces) -> Vec<usize> {
        pieces.pieces.iter().map(ExactSizeIterator::len).collect()
    }

    #[test]
    fn a_line_is_cut_evenly() {
        let edges: Vec<_> = (1..101).map(|i| (i - 1, i)).collect();
        let pieces = divide(&[1; 101], none, &edges, 50).unwrap();
        assert_eq!(sizes(&pieces), [34, 34, 33]);
        assert_eq!(sizes(&divide(&[1; 101], none, &edges, 101).unwrap()), [101]);
        assert_eq!(sizes(&divide(&[1; 101], none, &edges, 0).unwrap()), [1; 101]);
    }

    #[test]
    fn nodes_without_kernels_stay_behind_those_with_them() {
        let edges: Vec<_> = (1..6).map(|i| (i - 1, i)).collect();
        assert_eq!(sizes(&divide(&[0, 1, 0, 1, 0, 0], none, &edges, 1).unwrap()), [3, 3]);
        assert_eq!(sizes(&divide(&[0, 0], none, &[], 1).unwrap()), [2]);
        assert_eq!(sizes(&divide(&[], none, &[], 1).unwrap()), [0; 0]);
        // A child graph of 9 kernels is not opened.
        assert_eq!(sizes(&divide(&[1, 1, 9, 1, 1, 0], none, &edges, 4).unwrap()), [2, 1, 3]);
    }

    #[test]
    fn a_node_that_stands_alone_is_a_piece() {
        let edges: Vec<_> = (1..6).map(|i| (i - 1, i)).collect();
        let alone = |at: &'static [usize]| move |node: usize| at.contains(&node);
        assert_eq!(sizes(&divide(&[1; 6], alone(&[2]), &edges, 6).unwrap()), [2, 1, 3]);
        assert_eq!(sizes(&divide(&[1; 6], alone(&[0, 1, 5]), &edges, 2).unwrap()), [1, 1, 2, 1, 1]);
        // What is copied behind it is in a piece without a kernel.
        assert_eq!(
            sizes(&divide(&[0, 1, 0, 1, 0, 1], alone(&[3, 5]), &edges, 9).unwrap()),
            [3, 1, 1, 1]
        );
    }

    #[test]
    fn branches_that_may_wait_for_one_another_stay_together() {
        // A fork and its join: 0 -> {1, 2} -> 3, then a line.
        let edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (4, 5)];
        assert_eq!(sizes(&divide(&[1; 6], none, &edges, 1).unwrap()), [1, 2, 1, 1, 1]);
        assert_eq!(sizes(&divide(&[1; 6], |n| n == 1, &edges, 6).unwrap()), [6], "not taken out");
        assert_eq!(sizes(&divide(&[1; 6], |n| n == 3, &edges, 6).unwrap()), [3, 1, 2]);
        // Two lines side by side; every one of the first two before every one of the next two.
        assert_eq!(sizes(&divide(&[1; 4], none, &[(0, 1), (2, 3)], 1).unwrap()), [4]);
        let both = [(0, 2), (0, 3), (1, 2), (1, 3), (0, 2)];
        assert_eq!(sizes(&divide(&[1; 4], none, &both, 1).unwrap()), [2, 2]);
        assert_eq!(sizes(&divide(&[1; 4], none, &both[..3], 1).unwrap()), [4], "1 beside 3");
    }

    #[test]
    fn circles_and_unknown_nodes_are_refused() {
        assert_eq!(divide(&[1, 1], none, &[(0, 1), (1, 0)], 1), Err(NotAnOrder));
        assert_eq!(divide(&[1, 1], none, &[(0, 2)], 1), Err(NotAnOrder));
        assert_eq!(divide(&[1], none, &[(0, 0)], 1), Err(NotAnOrder));
    }

    /// Nodes with their kernels, edges of a graph without circles (but in no helpful numbering),
    /// and a wanted size.
    type Drawn = (Vec<(u32, bool)>, Vec<(usize, usize)>, u32);

    fn graphs() -> impl Strategy<Value = Drawn> {
        (1_usize..60).prop_flat_map(|n| {
            let kernels = prop_oneof![3 => Just(1), 1 => 0..7_u32];
            let alone = prop_oneof![2 => Just(false), 1 => prop::bool::weighted(0.2)];
            let kernels = prop::collection::vec((kernels, alone), n);
            let number = Just((0..n).collect::<Vec<_>>()).prop_shuffle();
            let pairs = prop::collection::vec((0..n, 0..n), 0..3 * n);
            (kernels, number, pairs, 0_u32..12).prop_map(|(kernels, number, pairs, wanted)| {
                let edges = pairs.into_iter().filter(|(a, b)| a < b);
                let edges = edges.map(|(a, b)| (number[a], number[b])).collect();
                (kernels, edges, wanted)
            })
        })
    }

    proptest! {
        #[test]
        fn every_rule_holds((kernels, edges, wanted) in graphs()) {
            let (kernels, alone): (Vec<u32>, Vec<bool>) = kernels.into_iter().unzip();
            let again = || divide(&kernels, |node| alone[node], &edges, wanted).unwrap();
            let found = again();
            prop_assert_eq!(&found, &again());
            let nodes = kernels.len();
            let mut is_before = vec![vec![false; nodes]; nodes];
            for to in &found.order {
                let direct = edges.iter().filter(|(_, t)| t == to).map(|(from, _)| *from);
                for from in direct.collect::<Vec<_>>() {
                    is_before[from][*to] = true;
                    for row in &mut is_before {
                        row[*to] |= row[from];
                    }
                }
            }
            let is_separator = |at: usize| {
                let (first, rest) = found.order.split_at(at);
                first.iter().all(|a| rest.iter().all(|b| is_before[*a][*b]))
            };
            let mut end = 0;
            for piece in &found.pieces {
                prop_assert!(piece.start == end && piece.end > piece.start);
                end = piece.end;
                prop_assert!(is_separator(piece.start), "a boundary that adds order");
                let inside = &found.order[piece.clone()];
                let stands_alone = |n: &usize| {
                    let at = found.order.iter().position(|o| o == n).unwrap();
                    alone[*n] && is_separator(at) && is_separator(at + 1)
                };
                prop_assert!(inside.len() == 1 || !inside.iter().any(stands_alone), "{inside:?}");
                // It has more than wanted only where it could not be divided.
                let sum: u32 = inside.iter().map(|n| kernels[*n]).sum();
                if sum > wanted.max(1) {
                    let kernels_before = |at: usize| -> u32 {
                        found.order[piece.start..at].iter().map(|n| kernels[*n]).sum()
                    };
                    let could = (piece.start + 1..piece.end).any(|at| {
                        let (before, here) = (kernels_before(at), kernels[found.order[at]]);
                        is_separator(at) && here > 0 && before > 0
                            && before + here > wanted.max(1)
                    });
                    prop_assert!(!could, "{inside:?}");
                }
            }
            prop_assert_eq!(end, nodes);
            let place = |n: usize| found.order.iter().position(|o| *o == n);
            for (from, to) in &edges {
                prop_assert!(place(*from) < place(*to));
            }
        }

        #[test]
        fn any_edges_give_an_answer(
            n in 0_usize..12, edges in prop::collection::vec((0_usize..14, 0_usize..14), 0..30),
        ) {
            let _ = divide(&vec![1; n], |node| node % 3 == 1, &edges, 2);
        }
    }
}
