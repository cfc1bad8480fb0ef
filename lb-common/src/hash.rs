//! The one hash function of the datapath.

/// Mixes 64 bits so that each input bit changes each output bit with probability near one half.
///
/// The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
#[inline(always)]
pub const fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Hashes a sequence of words; the order counts.
#[inline(always)]
pub const fn combine(hash: u64, word: u64) -> u64 {
    mix(hash ^ word)
}

/// Maps 32 bits evenly onto `0..n` by multiply-shift; 0 for an empty range.
#[inline(always)]
pub const fn scale(bits: u32, n: u32) -> u32 {
    ((bits as u64 * n as u64) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_is_splitmix64() {
        // First outputs of the published generator from seed 0.
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn scale_covers_its_range_and_nothing_else() {
        for n in [1u32, 2, 3, 251, 65_521, u32::MAX] {
            assert_eq!(scale(0, n), 0);
            assert_eq!(scale(u32::MAX, n), n - 1);
        }
        assert_eq!(scale(u32::MAX, 0), 0);
    }
}
