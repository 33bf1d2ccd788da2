//! When certificates end. What else is in them is TLS' business.

/// When the first of these certificates (DER) ends, in seconds since 1970; none if there is none, or one cannot be read.
pub fn ends_at_seconds<'a>(certificates: impl IntoIterator<Item = &'a [u8]>) -> Option<u64> {
    let ends = certificates.into_iter().map(|certificate| {
        let (_, read) = x509_parser::parse_x509_certificate(certificate).ok()?;
        u64::try_from(read.validity().not_after.timestamp()).ok()
    });
    ends.collect::<Option<Vec<_>>>()?.into_iter().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A certificate that ends with this day.
    fn ends(year: i32, month: u8, day: u8) -> Vec<u8> {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut made = rcgen::CertificateParams::new(["a".to_owned()]).unwrap();
        made.not_after = rcgen::date_time_ymd(year, month, day);
        made.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn the_first_of_a_chain_that_ends_counts() {
        // `date -ud 2031-02-03 +%s`, and of the year 2060, which X.509 writes in another form (RFC 5280 section 4.1.2.5).
        let (sooner, later) = (ends(2031, 2, 3), ends(2060, 1, 1));
        let of = |chain: &[&Vec<u8>]| ends_at_seconds(chain.iter().map(|der| der.as_slice()));
        assert_eq!(of(&[&sooner]), Some(1_927_843_200));
        assert_eq!(of(&[&later]), Some(2_840_140_800));
        assert_eq!(of(&[&later, &sooner]), Some(1_927_843_200));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[&sooner, &b"no certificate".to_vec()]), None);
    }
}
