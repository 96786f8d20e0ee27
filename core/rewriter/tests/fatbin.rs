//! Containers made here, read back; and anything at all, read without a panic.

use proptest::prelude::*;
use tally_rewriter::fatbin::{
    Compression, Entry, Fatbin, FatbinError, HEADER_BYTES, Kind, MAGIC, container_bytes, pack,
};

const PTX: &[u8] =
    b".version 8.0\n.target sm_80\n.address_size 64\n// aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n\0";

/// One entry as `fatbinary` lays it out.
fn entry(kind: u16, arch: u32, header_bytes: u32, how: Compression, content: &[u8]) -> Vec<u8> {
    let packed = match how {
        Compression::None => content.to_vec(),
        Compression::Lz4 => lz4_flex::block::compress(content),
        Compression::Zstd => {
            ruzstd::encoding::compress_to_vec(content, ruzstd::encoding::CompressionLevel::Fastest)
        }
    };
    let padding = packed.len().next_multiple_of(8) - packed.len();
    let (flag, sizes) = match how {
        Compression::None => (0, (0, 0)),
        Compression::Lz4 => (0x2000, (packed.len() as u32, content.len() as u64)),
        Compression::Zstd => (0x8000, (packed.len() as u32, content.len() as u64)),
    };
    let mut out = Vec::new();
    out.extend(kind.to_le_bytes());
    out.extend(0x0101u16.to_le_bytes());
    out.extend(header_bytes.to_le_bytes());
    out.extend(((packed.len() + padding) as u64).to_le_bytes());
    out.extend(sizes.0.to_le_bytes());
    out.extend([0; 4]);
    out.extend([0, 0, 8, 0]);
    out.extend(arch.to_le_bytes());
    out.extend([0; 8]);
    out.extend((0x11u64 | flag).to_le_bytes());
    out.extend([0; 8]);
    out.extend(sizes.1.to_le_bytes());
    out.resize(header_bytes as usize, 0);
    out.extend(packed);
    out.resize(out.len() + padding, 0);
    out
}

fn container(entries: &[Vec<u8>]) -> Vec<u8> {
    let body = entries.concat();
    let mut out = MAGIC.to_le_bytes().to_vec();
    out.extend(1u16.to_le_bytes());
    out.extend(16u16.to_le_bytes());
    out.extend((body.len() as u64).to_le_bytes());
    out.extend(body);
    out
}

fn sample() -> Vec<u8> {
    container(&[
        entry(1, 80, 64, Compression::None, PTX),
        entry(1, 90, 72, Compression::Lz4, PTX),
        entry(2, 90, 112, Compression::Zstd, PTX),
        entry(9, 75, 80, Compression::None, b"what is this"),
    ])
}

#[test]
fn all_three_packings_read_back() {
    let mut bytes = sample();
    assert_eq!(container_bytes(&bytes[..HEADER_BYTES]).unwrap(), bytes.len() as u64);
    bytes.extend(b"the next container");
    let fatbin = Fatbin::parse(&bytes).unwrap();
    let facts: Vec<_> =
        fatbin.entries().iter().map(|e: &Entry<'_>| (e.kind, e.arch, e.compression)).collect();
    assert_eq!(
        facts,
        [
            (Kind::Ptx, 80, Compression::None),
            (Kind::Ptx, 90, Compression::Lz4),
            (Kind::Elf, 90, Compression::Zstd),
            (Kind::Other(9), 75, Compression::None),
        ]
    );
    for entry in &fatbin.entries()[..3] {
        assert_eq!(&entry.payload().unwrap()[..PTX.len()], PTX);
    }
}

#[test]
fn errors_say_where_and_what() {
    let bytes = sample();
    let wrong_magic = Fatbin::parse(&[0; 64]).unwrap_err();
    assert!(wrong_magic.to_string().contains("0xba55ed50"), "{wrong_magic}");
    assert!(matches!(Fatbin::parse(&bytes[..10]), Err(FatbinError::Truncated { .. })));
    let cut = Fatbin::parse(&bytes[..bytes.len() - 1]).unwrap_err();
    assert!(matches!(cut, FatbinError::Truncated { what: "container", .. }), "{cut}");

    let mut long = bytes.clone();
    long[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(Fatbin::parse(&long).is_err());

    let mut version = bytes.clone();
    version[18] = 7;
    let error = Fatbin::parse(&version).unwrap_err();
    assert!(matches!(error, FatbinError::Unexpected { what: "entry version", offset: 18, .. }));
}

#[test]
fn a_lying_size_is_an_error_and_not_an_allocation() {
    for how in [Compression::Lz4, Compression::Zstd] {
        for size in [0u64, 1, PTX.len() as u64 + 1, 1 << 29] {
            let mut bytes = container(&[entry(1, 90, 64, how, PTX)]);
            bytes[16 + 56..16 + 64].copy_from_slice(&size.to_le_bytes());
            let fatbin = Fatbin::parse(&bytes).unwrap();
            let error = fatbin.entries()[0].payload().unwrap_err();
            assert!(matches!(error, FatbinError::Unpack { expected, .. } if expected == size));
        }
        let mut bytes = container(&[entry(1, 90, 64, how, PTX)]);
        bytes[16 + 56..16 + 64].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Fatbin::parse(&bytes).is_err());
    }
}

fn read_all(bytes: &[u8]) {
    let _ = container_bytes(bytes);
    if let Ok(fatbin) = Fatbin::parse(bytes) {
        for entry in fatbin.entries() {
            if let Ok(payload) = entry.payload() {
                assert!(payload.len() < 1 << 24);
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        read_all(&bytes);
        let mut framed = container(&[]);
        framed[8..16].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        framed.extend(bytes);
        read_all(&framed);
    }

    #[test]
    fn any_damage(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = sample();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        read_all(&bytes);
        read_all(&bytes[..cut.index(bytes.len())]);
    }

    #[test]
    fn any_content(content in prop::collection::vec(any::<u8>(), 1..2000), arch in 30u32..130) {
        for how in [Compression::None, Compression::Lz4, Compression::Zstd] {
            let bytes = container(&[entry(2, arch, 64, how, &content)]);
            let fatbin = Fatbin::parse(&bytes).unwrap();
            let payload = fatbin.entries()[0].payload().unwrap();
            prop_assert_eq!(&payload[..content.len()], &content[..]);
        }
    }
}

/// An entry of `pack`, with flags added.
fn flagged(mut container: Vec<u8>, index: usize, flags: u64) -> Vec<u8> {
    let (mut at, mut left) = (16, index);
    while left > 0 {
        let padded = u64::from_le_bytes(container[at + 8..at + 16].try_into().unwrap());
        let header = u32::from_le_bytes(container[at + 4..at + 8].try_into().unwrap());
        at += header as usize + padded as usize;
        left -= 1;
    }
    let old = u64::from_le_bytes(container[at + 40..at + 48].try_into().unwrap());
    container[at + 40..at + 48].copy_from_slice(&(old | flags).to_le_bytes());
    container
}

/// As `fatbinary --create=k.fatbin --64 --compress=false --image3=kind=ptx,sm=70,file=k.ptx` of CUDA 13.0.88 does.
#[test]
fn ptx_is_packed_as_nvidias_tool_packs_it() {
    let ptx = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k() { ret; }\n\0";
    let header = [
        // The container: magic, version and header size, size of what follows.
        0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0, 0xa0, 0, 0, 0, 0, 0, 0, 0,
        // The entry: kind, version, header size, size; packed size, options, version, architecture.
        1, 0, 1, 1, 0x50, 0, 0, 0, 0x50, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0, 7, 0,
        70, 0, 0, 0, // Name, flags, unpacked size.
        0, 0, 0, 0, 0, 0, 0, 0, 0x11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, // Options.
        0x48, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    let packed = pack(&[(Kind::Ptx, 70, ptx)]);
    assert_eq!(packed[..header.len()], header);
    assert_eq!(packed[header.len()..][..ptx.len()], *ptx);
    assert_eq!(packed.len(), header.len() + 80);
}

#[test]
fn what_is_packed_is_read() {
    let packed = pack(&[(Kind::Elf, 90, b"code"), (Kind::Ptx, 80, PTX)]);
    let read = Fatbin::parse(&packed).unwrap();
    assert_eq!(read.entries().len(), 2);
    assert_eq!(&*read.entries()[0].payload().unwrap(), b"code\0\0\0\0");
    assert!(read.entries()[1].payload().unwrap().starts_with(PTX));
    assert_eq!(container_bytes(&packed).unwrap(), packed.len() as u64);
}

#[test]
fn the_entry_is_chosen_as_the_driver_does() {
    const SPECIFIC: u64 = 0x10_0000;
    const FAMILY: u64 = 0x20_0000;
    let chosen = |container: &[u8], arch| {
        let read = Fatbin::parse(container).unwrap();
        read.choose(arch).map(|e| (e.kind, e.arch, e.flags & (SPECIFIC | FAMILY)))
    };
    let plain = pack(&[
        (Kind::Ptx, 90, PTX),
        (Kind::Elf, 80, b"a"),
        (Kind::Elf, 86, b"b"),
        (Kind::Elf, 90, b"c"),
        (Kind::Elf, 90, b"d"),
    ]);
    assert_eq!(chosen(&plain, 80), Some((Kind::Elf, 80, 0)));
    // Code of the same major version, no later; never of another.
    assert_eq!(chosen(&plain, 89), Some((Kind::Elf, 86, 0)));
    assert_eq!(chosen(&plain, 75), None);
    assert_eq!(chosen(&plain, 100), Some((Kind::Ptx, 90, 0)));
    // `sm_90a`: before `sm_90` on its device, never on another.
    let specific = flagged(plain.clone(), 3, SPECIFIC);
    assert_eq!(chosen(&specific, 90), Some((Kind::Elf, 90, SPECIFIC)));
    let later = pack(&[(Kind::Elf, 100, b"a"), (Kind::Ptx, 100, PTX), (Kind::Ptx, 90, PTX)]);
    assert_eq!(chosen(&flagged(later.clone(), 0, SPECIFIC), 103), Some((Kind::Ptx, 100, 0)));
    assert_eq!(chosen(&flagged(later.clone(), 0, FAMILY), 103), Some((Kind::Elf, 100, FAMILY)));
    let ptx = flagged(flagged(later, 0, SPECIFIC), 1, SPECIFIC);
    assert_eq!(chosen(&ptx, 103), Some((Kind::Ptx, 90, 0)));
}
