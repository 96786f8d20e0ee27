//! The kernel by which a machine is proven computes what the host expects of it.
#![allow(missing_docs)]

mod common;

use common::{Case, World};
use tally_rewriter::proof;
use tally_softcuda_vm::{Module, Scratch};

#[test]
fn the_proof_kernel_computes_what_the_host_expects() {
    const BLOCKS: usize = 5 * 3 * 2;
    for rounds in [0, 1, 9] {
        let line = format!("tally_proof grid=5,3,2 block=128,1,1 args=buf:30,buf:30,u32:{rounds}");
        let case = Case::read(proof::PTX, &line);
        let module = Module::parse(proof::PTX).unwrap();
        let world = World::new(&case, &module, proof::NAME, 1, false);
        assert_eq!(world.params.len(), proof::PARAMETER_BYTES);
        let [sums, counts] =
            [0, 8].map(|at| u64::from_le_bytes(world.params[at..at + 8].try_into().unwrap()));
        let before = world.device.words(counts, BLOCKS);
        for block in 0..BLOCKS as u32 {
            world.run(&world.params, [5, 3, 2], block, 0, &mut Scratch::new());
        }
        let wanted: Vec<_> = (0..BLOCKS as u32).map(|b| proof::expected(b, rounds)).collect();
        assert_eq!(world.device.words(sums, BLOCKS), wanted, "{rounds} rounds");
        let after: Vec<_> = before.iter().map(|n| n.wrapping_add(1)).collect();
        assert_eq!(world.device.words(counts, BLOCKS), after);
        assert!(wanted.iter().collect::<std::collections::BTreeSet<_>>().len() == BLOCKS);
    }
}
